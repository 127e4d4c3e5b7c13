"""Reward and retriever as processes, in plain text, with TLS, and with mutual TLS and a token."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from forage_runtime.clients.health import ask_service
from forage_runtime.security.certificates import issue_certificate, make_authority
from forage_runtime.security.tls import http_scheme
from forage_runtime.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[3]
PLAIN, TLS, MUTUAL = "plain text", "TLS", "mutual TLS + token"
WAYS = (PLAIN, TLS, MUTUAL)
PASSAGES = 5000
START_S = 120.0


@dataclass(frozen=True)
class Stack:
    """Both services in one way of speaking, and the settings of their callers."""

    settings: Settings
    reward: psutil.Process
    retriever: psutil.Process


@contextmanager
def run_stacks(folder: Path) -> Iterator[dict[str, Stack]]:
    """Run the services of every way until the block ends."""
    corpus = write_corpus(folder / "corpus.jsonl")
    with ExitStack() as stack:
        yield {way: stack.enter_context(_run_stack(folder, corpus, way)) for way in WAYS}


def write_corpus(file: Path) -> Path:
    """Write passages of 100 words, as those of Wikipedia are cut."""
    words = [f"word{number}" for number in range(2000)]
    with file.open("w", encoding="utf-8") as stream:
        for number in range(PASSAGES):
            text = " ".join(words[(number * 7 + place * place) % len(words)] for place in range(100))
            stream.write(json.dumps({"id": str(number), "contents": f'"Passage {number}"\n{text}'}) + "\n")
    return file


@contextmanager
def _run_stack(folder: Path, corpus: Path, way: str) -> Iterator[Stack]:
    settings = _make_settings(folder, way)
    common = {"tls": _to_strings(settings.tls.model_dump())}
    reward = common | {
        "reward": _to_strings(settings.reward.model_dump(include={"grpc_address", "health_address", "auth_token_file"}))
    }
    retriever = common | {
        "data": {"corpus": str(corpus)},
        "retriever": _to_strings(
            settings.retriever.model_dump(include={"http_address", "grpc_address", "auth_token_file"})
        )
        | {"mode": "bm25", "cache_dir": str(folder / "index")},
    }
    scheme = http_scheme(settings.tls)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_run_service(name, folder / f"{name}-{WAYS.index(way)}", overrides, settings, url))
            for name, overrides, url in (
                ("reward", reward, f"{scheme}://{settings.reward.health_address}/readyz"),
                ("retriever", retriever, f"{scheme}://{settings.retriever.http_address}/readyz"),
            )
        ]
        yield Stack(settings, *processes)


def _make_settings(folder: Path, way: str) -> Settings:
    values: dict[str, Any] = {
        "reward": {"grpc_address": _find_address(), "health_address": _find_address()},
        "retriever": {"http_address": _find_address(), "grpc_address": _find_address()},
        "rollout": {"score_timeout_s": 60},
    }
    if way != PLAIN:
        own = folder / way.replace(" ", "-")
        authority = make_authority(own)
        issued = issue_certificate(authority, own, "service")
        values["tls"] = {"ca": authority.cert, "cert": issued.cert, "key": issued.key}
    if way == MUTUAL:
        values["tls"]["require_client_cert"] = True
        (own / "token").write_text(secrets.token_urlsafe(32), encoding="utf-8")
        for service in ("reward", "retriever"):
            values[service]["auth_token_file"] = own / "token"
    return Settings.model_validate(values)


@contextmanager
def _run_service(
    name: str, base: Path, overrides: dict[str, Any], settings: Settings, url: str
) -> Iterator[psutil.Process]:
    config = base.with_suffix(".json")
    config.write_text(json.dumps(overrides), encoding="utf-8")  # JSON is YAML
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORAGE__")}
    python = REPOSITORY / ".venvs" / name / "bin/python"
    with base.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [python, "-m", f"forage_{name}", "--config", str(config)], env=environment, stderr=log, stdout=log
        )
    try:
        deadline = time.monotonic() + START_S
        while not ask_service(url, settings.tls).is_ready:
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the {name} did not start: see {base.with_suffix('.log')}")
            time.sleep(0.05)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _to_strings(values: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _find_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
