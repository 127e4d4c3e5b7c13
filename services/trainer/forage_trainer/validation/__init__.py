"""Evaluation of the policy on held-out questions during training."""
