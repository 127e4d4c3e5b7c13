"""The console: runs and trajectories in a browser."""
