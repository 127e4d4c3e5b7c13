"""A training run on this machine: its settings, its start and end, its view, and the same in the background."""
