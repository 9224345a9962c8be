"""Dictionaries of features: sites read through a sparse autoencoder or the like, and the folders they come in."""
