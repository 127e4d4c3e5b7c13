"""Parsers of model output: format, answers, turns, arithmetic."""
