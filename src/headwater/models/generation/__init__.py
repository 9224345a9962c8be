"""Generation: the one loop that lets a model write, how the next token is chosen, and the texts that come of it."""
