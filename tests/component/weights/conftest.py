"""A disk that can be filled up."""

from full_disk import small_disk

__all__ = ["small_disk"]
