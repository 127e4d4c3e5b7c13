"""Redis streams between the trainer and the rollout service."""
