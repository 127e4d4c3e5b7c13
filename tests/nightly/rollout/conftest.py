"""Random models for tests of real engines, and a tokenizer of characters for scripted ones."""

from char_codec import char_codec
from engine_fixtures import make_model

__all__ = ["char_codec", "make_model"]
