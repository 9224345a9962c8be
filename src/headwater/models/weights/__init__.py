"""A model's parameters, a layer at a time: streamed from a checkpoint, or read of a model in memory."""
