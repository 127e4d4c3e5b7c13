"""`forage worker`: runs an agent of your own in the sessions of the rollout service."""
