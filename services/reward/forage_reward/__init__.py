"""Scores of finished trajectories: one file a reward, pure functions, behind gRPC."""
