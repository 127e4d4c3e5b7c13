"""Fixtures that start services as processes."""

from retriever_fixtures import corpus_file, loaded, texts
from service_process import start_service, wait_until_ready

__all__ = ["corpus_file", "loaded", "start_service", "texts", "wait_until_ready"]
