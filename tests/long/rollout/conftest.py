"""Random models for tests of real engines."""

from engine_fixtures import char_codec, make_model

__all__ = ["char_codec", "make_model"]
