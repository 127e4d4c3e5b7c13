"""Encoders of texts, local and remote."""
