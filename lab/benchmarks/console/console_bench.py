"""`make bench-console`: pages and filters over a made run of 200,000 trajectories of 2,000 tokens, and one of 32,000.

The real console serves the run, and the real front end is opened in Chromium. The run is made once and kept in
.cache/bench-console (4.5 GB); TRAJECTORIES=20000 makes a smaller one.

`first_page_s`: from the navigation until the first rows of the page Trajectories are drawn, console just started.
`filter_s`: the slowest of several filters over HTTP, each asked twice: after a start of the console, with the files of
run and console dropped from the system's cache, and again. `frame_ms_max`: the longest time between two frames while
the trajectory of 32,000 tokens is scrolled. `rss_mb`: peak memory of the console, also while it indexes the texts.
Baseline: reading every row of a step file with `forage_records.step_file.read_step` and filtering in Python, over a
part of the run, extrapolated to all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from frames import Browser
from made_run import COMMON, PHRASE, RARE, ROWS_OF_FILE, make_run
from rich.console import Console
from rich.table import Table

from forage_records.step_file import list_saved_steps, read_step, step_file_path

REPOSITORY = Path(__file__).resolve().parents[3]
LIMITS = {"first_page_s": 1.0, "filter_s": 1.0, "frame_ms_max": 50.0, "rss_mb": 500.0}
START_S, INDEX_S = 60.0, 3600.0
BASELINE_ROWS = 4000
FILTERS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "highest reward": {"sort": "reward"},
    "source and searches": {"source": "nq", "searches_min": 3, "sort": "search_advantage"},
    "failed": {"status": "TIMEOUT", "sort": "tokens"},
    "steps, right, versions": {"step_min": 5, "step_max": 60, "right": True, "version_min": 10, "sort": "mismatch"},
    "one question": {"uid": "nq/train/500/"},
    "last page": {"sort": "advantage", "offset": "end"},
    "rare word": {"text": RARE},
    "rare word by reward": {"text": RARE, "sort": "reward", "order": "ascending"},
    "common word": {"text": COMMON},
    "common word by reward": {"text": COMMON, "sort": "reward", "right": False},
    "phrase": {"text": f'"{PHRASE}"', "sort": "advantage"},
    "word and phrase": {"text": f'{RARE} "{PHRASE}"', "truncated": True},
    "beginning of words": {"text": "rarity1*"},
    "no such word": {"text": "nonexistent"},
}


@dataclass(frozen=True)
class Server:
    """A console that serves. client: of its API for the made run."""

    address: str
    client: httpx.Client
    process: psutil.Process

    def list_rows(self, **query: Any) -> dict[str, Any]:
        reply = self.client.get("/trajectories", params={"limit": 100} | query)
        reply.raise_for_status()
        page: dict[str, Any] = reply.json()
        return page

    def measure_peak_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024


@contextmanager
def serve(runs: Path, cache: Path) -> Iterator[Server]:
    """Run a console until the end of the block; it answers `/readyz`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = [f"console.http_address={address}", f"console.runs={runs}", f"console.cache_dir={cache}"]
    command = [sys.executable, "-m", "forage_console", *settings]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=runs) as process:
        try:
            _wait_until_ready(address, process)
            with httpx.Client(base_url=f"http://{address}/api/runs/made", timeout=120, trust_env=False) as client:
                yield Server(address, client, psutil.Process(process.pid))
        finally:
            process.terminate()


def _wait_until_ready(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://{address}/readyz", trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)  # wait: for the console's start
    raise SystemExit(f"the console did not start (exit code {process.poll()})")


def drop_from_memory(folder: Path) -> None:
    """Drop files from the system's cache, as if they had not been read for long."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass
class First:
    """The first start over a run that no console has seen. Seconds from the first request on."""

    answer_s: float = 0.0
    read_s: float = 0.0
    index_s: float = 0.0
    search_s: float = 0.0
    rss_mb: float = 0.0


def measure_first_start(runs: Path, cache: Path, say: Any) -> First:
    """Measure how long table and index take."""
    found = First()
    with serve(runs, cache) as server:
        began = time.monotonic()
        page = server.list_rows()
        found.answer_s = time.monotonic() - began
        while page["loaded"] < 1:
            page = server.list_rows(limit=1)
        found.read_s = time.monotonic() - began
        asked = time.monotonic()
        server.list_rows(text=RARE)
        found.search_s = time.monotonic() - asked
        while page["indexed"] < 1:
            if time.monotonic() - began > INDEX_S:
                raise SystemExit(f"the index was not complete after {INDEX_S:.0f} s")
            say(f"the index of texts: {page['indexed']:.0%}")
            time.sleep(1)  # wait: for the index
            page = server.list_rows(limit=1)
        found.index_s = time.monotonic() - began
        found.rss_mb = server.measure_peak_mb()
    return found


@dataclass(frozen=True)
class Answer:
    """The answers to a filter: seconds of the first and of the second, processor seconds of both, rows that pass."""

    first_s: float
    again_s: float
    work_s: float
    total: int


def measure_filters(server: Server, say: Any) -> dict[str, Answer]:
    """Measure each filter twice."""
    everything = server.list_rows(limit=1)["total"]
    found = {}
    for name, query in FILTERS.items():
        say(f"the filter '{name}'")
        asked = query | ({"offset": everything - 100} if query.get("offset") == "end" else {})
        times = []
        worked = sum(server.process.cpu_times()[:2])
        for _ in range(2):
            began = time.perf_counter()
            total = server.list_rows(**asked)["total"]
            times.append(time.perf_counter() - began)
        found[name] = Answer(times[0], times[1], sum(server.process.cpu_times()[:2]) - worked, total)
    return found


def measure_baseline(run: Path) -> tuple[float, int]:
    """Read rows and filter them in Python: (seconds for the whole run, rows that were read)."""
    read = kept = 0
    began = time.perf_counter()
    for step in list_saved_steps(run):
        for row in read_step(step_file_path(run, step)):
            read += 1
            kept += any(RARE in span.text for span in row.trajectory.spans)
        if read >= BASELINE_ROWS:
            break
    return (time.perf_counter() - began) / read, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=200_000)
    parser.add_argument("--keep-index", action="store_true", help="of an earlier run: its time is not measured again")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the console that it started ends, too
    home = REPOSITORY / ".cache/bench-console" / str(arguments.trajectories)
    runs, cache = home / "runs", home / "cache"
    if not arguments.keep_index:
        shutil.rmtree(cache, ignore_errors=True)
    console = Console(stderr=True)
    with console.status("making the run") as spinner:

        def say(what: str) -> None:
            spinner.update(what)

        run = make_run(runs, arguments.trajectories)
        first = measure_first_start(runs, cache, say)
        drop_from_memory(home)
        with serve(runs, cache) as server, Browser() as browser:
            say("the page Trajectories")
            first_page_s = browser.measure_first_page(f"http://{server.address}/runs/made/trajectories")
            filters = measure_filters(server, say)
            say("the trajectory of 32,000 tokens")
            step = -(-arguments.trajectories // ROWS_OF_FILE) + 1
            frames = browser.measure_frames(f"http://{server.address}/runs/made/trajectories/step-{step}/0")
            rss_mb = max(first.rss_mb, server.measure_peak_mb())
        say("the baseline")
        baseline_row_s, baseline_rows = measure_baseline(run)
    baseline_s = baseline_row_s * arguments.trajectories
    filter_s = max(max(answer.first_s, answer.again_s) for answer in filters.values())
    print_filters(filters)
    files = sum(file.stat().st_size for file in run.rglob("*.parquet")) / 1e9
    made = {file.name: file.stat().st_size / 1e9 for file in cache.rglob("*") if file.is_file()}
    print(f"{arguments.trajectories} trajectories in {files:.1f} GB of step files; kept beside them: "
          f"values {made['values.duckdb']:.2f} GB, texts {made['texts.sqlite']:.2f} GB")  # fmt: skip
    print(f"first start: answer after {first.answer_s:.2f} s, all files read after {first.read_s:.1f} s, "
          f"texts indexed after {first.index_s:.0f} s; a search before that: {first.search_s:.1f} s")  # fmt: skip
    print(f"32,000 tokens: {frames.count} frames while scrolling, the longest {frames.longest_ms:.0f} ms, "
          f"99 % within {frames.most_ms:.0f} ms, {frames.work_ms:.1f} ms of processor time each; "
          f"drawn after {frames.open_s:.2f} s")  # fmt: skip
    print(f"baseline: {baseline_s:.0f} s to read and filter every row in Python (extrapolated from {baseline_rows})")
    found = {"first_page_s": first_page_s, "filter_s": filter_s, "frame_ms_max": frames.longest_ms, "rss_mb": rss_mb}
    for name, limit in LIMITS.items():
        print(f"{name:14} {found[name]:8.2f}   limit {limit:g}{'' if found[name] <= limit else '   EXCEEDED'}")
    print(
        json.dumps(
            {name: round(value, 3) for name, value in found.items()}
            | {
                "load": round(os.getloadavg()[0], 1),
                "trajectories": arguments.trajectories,
                "index_s": round(first.index_s, 1),
                "baseline": "read_step and a filter in Python, extrapolated",
                "baseline_s": round(baseline_s, 1),
                "ratio": round(baseline_s / filter_s, 1),
            }
        )
    )


def print_filters(filters: dict[str, Answer]) -> None:
    table = Table(title="A page of 100 rows, seconds")
    for column in ("filter", "passes", "first", "again", "processor, of both"):
        table.add_column(column, justify="left" if column == "filter" else "right")
    for name, answer in filters.items():
        times = (f"{value:.3f}" for value in (answer.first_s, answer.again_s, answer.work_s))
        table.add_row(name, f"{answer.total:,}", *times)
    Console().print(table)


if __name__ == "__main__":
    main()
