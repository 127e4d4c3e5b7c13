"""Metrics, guards, trackers, progress and trajectory files of a run."""
