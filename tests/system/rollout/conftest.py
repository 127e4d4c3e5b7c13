"""A retriever that fails as told, the agent over it, and services as processes."""

from faulty_services import codec, faulty_retriever, make_parts
from service_process import start_service, wait_until_ready

__all__ = ["codec", "faulty_retriever", "make_parts", "start_service", "wait_until_ready"]
