"""A Ray cluster with scripted engines, shared by all tests of the folder."""

from scripted_cluster import caller

__all__ = ["caller"]
