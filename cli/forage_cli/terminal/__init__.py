"""Output for a terminal: progress bars, and trajectories as text or token by token."""
