"""Readers of a run folder: metrics, ledger, trajectories."""
