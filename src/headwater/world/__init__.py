"""World: the embedded model, the corpus it was trained on, and planted models for tests."""
