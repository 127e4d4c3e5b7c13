"""Trajectories as the trainer holds them: small messages, and arrays for what they have for each token."""
