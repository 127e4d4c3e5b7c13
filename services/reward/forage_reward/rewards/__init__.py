"""The rewards, one module each."""
