"""Environments that a policy acts on, one module each; `environment.py` is their base."""

from forage_rollout.environments.environment import Action, Budget, Environment, Episode, Observation
from forage_rollout.environments.registry import Environments, load_environments

__all__ = ["Action", "Budget", "Environment", "Environments", "Episode", "Observation", "load_environments"]
