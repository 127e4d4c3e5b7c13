"""The limit of waits in tests."""

WAIT_S = 120.0
"""Longest wait for something that must happen. It only ends a test that hangs: a machine may be slow by any factor."""
