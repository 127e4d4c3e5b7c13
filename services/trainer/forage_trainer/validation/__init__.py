"""Validation of the policy during training: held-out questions, probes, and the penalty for overconfidence."""
