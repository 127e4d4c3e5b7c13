"""Faults of every kind, at seeded random instants, in the real stack of `forage demo`: see scripts/chaos.py."""
