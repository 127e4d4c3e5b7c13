"""Settings of the console."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from forage_runtime.settings.base import Address, Section, Url


class ConsoleSettings(Section):
    """The console: runs and trajectories in a browser."""

    http_address: Address = Field("127.0.0.1:18650", description="Address of pages, API, health and metrics over HTTP")
    runs: str = Field("", description="Folder with the folders of the runs, or its address (s3://…); empty: run.dir")
    auth_token_file: Path | None = Field(
        None, description="File with the token that a browser must give; needed unless http_address is this machine's"
    )
    hosts: tuple[str, ...] = Field(
        (), description="Names under which browsers reach it through a proxy, besides localhost and its own address"
    )
    cache_dir: Path | None = Field(
        None, description="Folder for what is derived from the runs' files; unset: one below the system's for caches"
    )
    trace_url: Url = Field(
        "",
        pattern=r"^$|^https?://[^\s]*\{trace_id\}[^\s]*$",
        description="URL of a trace in your tracing system, with {trace_id} in it; empty: traces are not linked",
    )
