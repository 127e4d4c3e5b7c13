"""A feeder and a batcher."""

from feeding_bench import bench

__all__ = ["bench"]
