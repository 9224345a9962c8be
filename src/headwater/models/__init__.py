"""Models: the only room that imports transformer_lens or transformers."""
