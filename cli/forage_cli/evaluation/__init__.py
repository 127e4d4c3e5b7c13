"""Evaluation of policies on files of questions, through the rollout loop of training, with baselines and intervals."""
