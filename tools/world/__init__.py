"""Makes the embedded models: their corpus, their training, their card. It is not part of the package."""
