"""Settings of the run as a whole: its name and folder, Redis, and the initial policy."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from forage_runtime.settings.base import Section, Url


class RunSettings(Section):
    """The run: its name, its folder, its seed."""

    id: str = Field(
        "local", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run, of its folder and of its keys in Redis"
    )
    dir: Path = Field(Path("runs"), description="Folder that holds the folders of all runs")
    record_history: bool = Field(
        False,
        description="Record every operation on the streams in <dir>/<id>/history, for `forage check-history`; each"
        " service writes to its own run.dir",
    )
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and model initialisation")
    repeatable: bool = Field(
        False,
        description="Sample the same tokens for the same seed and weights, whatever else runs and whatever dies; slow",
    )

    @property
    def folder(self) -> Path:
        return self.dir / self.id


_NODE = r"([^,:/@\[\]]+|\[[0-9A-Fa-f:.]+\]):\d+"
_NODES = rf"([^@/]*@)?{_NODE}(,{_NODE})*"
_REDIS_URL = rf"^(((rediss?|unix)://.+)|(rediss?\+sentinel://{_NODES}/[^/]+(/\d+)?)|(rediss?\+cluster://{_NODES}/?))$"


def _check_redis_url(url: str) -> str:
    if not re.match(_REDIS_URL, url):
        raise ValueError(
            "expected redis://[user[:password]@]host:port/database, rediss:// for TLS, unix://path, "
            "redis+sentinel://host:port,host:port/master or redis+cluster://host:port,host:port; an address of IPv6 is "
            "in brackets"
        )
    return url


_RedisUrl = Annotated[Url, AfterValidator(_check_redis_url), Field(json_schema_extra={"pattern": _REDIS_URL})]


class RedisSettings(Section):
    """The Redis server whose streams carry prompts and trajectory groups."""

    url: _RedisUrl = Field(
        "redis://127.0.0.1:18600/0",
        description="URL of the server: redis://[user[:password]@]host:port/database; rediss:// for TLS; unix://path;"
        " redis+sentinel://host:port,host:port/master asks sentinels for the primary; redis+cluster://host:port,host:port",
    )
    username: str = Field(
        "", pattern=r"^[A-Za-z0-9_-]*$", description="User of `forage redis acl`, if the URL names none; empty: default"
    )
    password_file: Path | None = Field(
        None, description="File with the user's password, if the URL has none; it is read again when it changes"
    )
    sentinel_password_file: Path | None = Field(None, description="File with the sentinels' own password, if any")
    ca_file: Path | None = Field(
        None, description="PEM file of the authority that signed the server's certificate; unset: tls.ca"
    )
    cert_file: Path | None = Field(
        None, description="PEM file of this client's certificate, if the server asks for one; unset: tls.cert"
    )
    key_file: Path | None = Field(None, description="PEM file of the private key of cert_file; unset: tls.key")
    timeout_s: float = Field(10.0, gt=0, description="Limit of one command")
    wait_replicas: int = Field(
        0, ge=0, description="Replicas that must confirm each write before it counts, so that a failover keeps it"
    )
    max_stream_bytes: int | None = Field(
        None,
        ge=0,
        description="Memory of groups that wait in Redis above which no more prompts are issued; unset: half of the"
        " server's maxmemory; 0: no limit",
    )
    inline_bytes: int | None = Field(
        2**20,
        ge=0,
        description="Packed bytes of a group above which its tokens and texts go into a file beside Redis; null: never",
    )
    payloads_url: Url = Field(
        "",
        description="Where these files are, as an fsspec URL that trainer and rollout service reach; empty: in the"
        " run's folder, if they share it",
    )
    require_durable: bool = Field(
        True,
        description="Refuse to train on a server that can lose acknowledged writes or evict keys; false: only warn",
    )
    reclaim_idle_s: float = Field(
        10.0, gt=0, description="Time without a keep-alive after which another worker reclaims a prompt"
    )


class LocalGpuSettings(Section):
    """GPUs of each service that `forage up` and `forage demo` start, by the numbers that nvidia-smi shows."""

    rollout: tuple[int, ...] | None = Field(None, description="GPUs of the engines; null: half of the machine's")
    trainer: tuple[int, ...] | None = Field(None, description="GPUs of the trainer; null: those left over")
    retriever: tuple[int, ...] = Field((), description="GPUs of the retriever; empty: it searches on the CPU")

    @model_validator(mode="after")
    def _check_numbers(self) -> LocalGpuSettings:
        for name in LocalGpuSettings.model_fields:
            numbers = getattr(self, name) or ()
            if len(set(numbers)) < len(numbers) or min(numbers, default=0) < 0:
                raise ValueError(f"{name} is {list(numbers)}: give each GPU once, by its number from 0")
        return self

    def find_overlap(self) -> str:
        """The first two services that share a GPU, and which; empty: none do."""
        named = {name: set(getattr(self, name) or ()) for name in ("rollout", "trainer", "retriever")}
        for one, other in itertools.combinations(named, 2):
            if shared := named[one] & named[other]:
                return f"{one} and {other} share GPU {min(shared)}"
        return ""


class LocalSettings(Section):
    """Services that one command starts on this machine."""

    gpus: LocalGpuSettings = LocalGpuSettings()


class ModelSettings(Section):
    """The model that is trained."""

    path: Path = Field(Path("models/tiny-policy"), description="Hugging Face model folder of the initial policy")
