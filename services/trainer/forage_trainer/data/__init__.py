"""Prompts out, groups back, and the tensors of a step."""
