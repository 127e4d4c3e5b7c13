"""Scripts that make the shipped models."""
