"""Trajectories of runs for queries: a table of their values and an index of their texts, kept up with their files."""
