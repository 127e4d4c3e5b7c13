"""Programs that run in the environment of a service: what is fuzzed there."""
