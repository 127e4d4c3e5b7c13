"""The Redis of a run: the users of a server, and what it gives a recipe."""
