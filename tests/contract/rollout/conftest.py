"""A retriever that fails as told, and the agent over it."""

from faulty_services import codec, faulty_retriever, make_parts

__all__ = ["codec", "faulty_retriever", "make_parts"]
