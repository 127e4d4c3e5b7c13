"""Rewards per token, KL control, off-policy weights and advantage estimators, without any engine."""
