"""Child processes for code that may hang, crash or allocate without bound."""
