"""Published numbers, as package data, and the runs that measure the same on a model of one's own."""
