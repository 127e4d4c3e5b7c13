"""A small corpus, the real encoder, exported once to the cache that services use too, and services as processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from full_disk import small_disk
from retriever_fixtures import corpus_file, loaded, texts
from retriever_parts import LONG_S
from retriever_service import Service, make_settings, start_one
from service_process import StartService, run_services, start_service, wait_until_ready

from forage_retriever.encoders.encoder import Encoder
from forage_retriever.encoders.factory import create_encoder
from forage_retriever.serve import front, shard
from forage_runtime.settings import RetrieverSettings

__all__ = ["corpus_file", "loaded", "small_disk", "start_service", "texts", "wait_until_ready"]


@pytest.fixture(scope="session")
def encoder(repository: Path) -> Encoder:
    return create_encoder(RetrieverSettings(cache_dir=repository / ".cache/retriever"))


@pytest.fixture(scope="session")
def shared_service(
    repository: Path,
    wait_until_ready: Callable[..., None],
    free_address: Callable[[], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    """A retriever as a process, over a small corpus, that most tests share."""
    folder = tmp_path_factory.mktemp("shared")
    start: StartService
    with run_services(repository, folder) as start:
        yield start_one(start, wait_until_ready, make_settings(folder, free_address))


@pytest.fixture
def patient_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front leaves no shard out because it is slow, and soon sees it come and go."""
    monkeypatch.setattr(front, "SHARD_TIMEOUT_S", LONG_S)
    monkeypatch.setattr(shard, "PROBE_TIMEOUT_S", LONG_S)
    monkeypatch.setattr(shard, "PROBE_S", 0.1)
