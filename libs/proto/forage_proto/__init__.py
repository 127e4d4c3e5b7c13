"""The contracts of Forage: the messages and services of `proto/forage/v1`."""
