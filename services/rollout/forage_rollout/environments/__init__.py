"""What a policy acts on. One file an environment; `environment.py` is what they share."""

from forage_rollout.environments.environment import Action, Budget, Environment, Episode, Observation
from forage_rollout.environments.registry import Environments, make

__all__ = ["Action", "Budget", "Environment", "Environments", "Episode", "Observation", "make"]
