"""The rewards, one a file."""
