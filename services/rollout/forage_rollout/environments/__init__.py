"""What a policy acts on. One file an environment; `environment.py` is what they share."""
