"""Runs a real Prometheus that scrapes the services under test, with the committed rules, and answers queries."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import WAIT_S, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
EXPORTER = "prometheus-redis-exporter"
_SCRAPE = "1s"


class Prometheus:
    """One server with its data in a folder; `close` stops it.

    has_targets: `scrape` has been called.
    """

    def __init__(self, folder: Path, free_address: Callable[[], str]) -> None:
        """Start the server, or skip the test if it is not installed."""
        binary = shutil.which("prometheus")
        if not binary:
            pytest.skip("prometheus is missing: apt-get install prometheus")
        self._targets = folder / "targets.json"
        self._targets.write_text("[]")
        self._free_address = free_address
        self._address = free_address()
        self._log = (folder / "prometheus.log").open("wb")
        configuration = {
            "global": {"scrape_interval": _SCRAPE, "evaluation_interval": "5s"},
            "rule_files": [str(REPOSITORY / "deploy/prometheus/rules/*.yaml")],
            "scrape_configs": [
                {"job_name": "any", "file_sd_configs": [{"files": [str(self._targets)], "refresh_interval": "1s"}]}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        self._processes = [
            self._start(
                binary,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={self._address}",
                "--log.level=warn",
            )
        ]
        self.started_at = time.time()
        self.has_targets = False
        wait_until(self._is_ready, lambda: (folder / "prometheus.log").read_text())

    def scrape(self, targets: Mapping[str, str], redis: str = "", password: Path | None = None) -> None:
        """Start to scrape these addresses, by job, and Redis at an address if its exporter is installed.

        Args:
            password: file with that of the exporter's user, which has the name of the file.
        """
        self.has_targets = True
        addresses = dict(targets)
        if redis and (binary := shutil.which(EXPORTER)):
            addresses["redis"] = self._free_address()
            arguments = (f"-redis.addr=redis://{redis}", f"-web.listen-address={addresses['redis']}")
            login = {"REDIS_USER": password.name, "REDIS_PASSWORD": password.read_text().strip()} if password else {}
            self._processes.append(self._start(binary, *arguments, environ=login))
        self._targets.write_text(
            json.dumps([{"targets": [at], "labels": {"job": job}} for job, at in addresses.items()])
        )

    def has_data(self, expr: str) -> bool:
        """Whether a query has had a value at any time since the start."""
        end = time.time()
        parameters = {
            "query": expr,
            "start": self.started_at,
            "end": end,
            "step": max(1.0, (end - self.started_at) / 2000),
        }
        series = self.request("query_range", parameters)["result"]
        return any(not math.isnan(float(value)) for one in series for _, value in one["values"])

    def request(self, endpoint: str, parameters: Mapping[str, Any] | None = None) -> Any:
        """Call the HTTP API and return the data of its reply."""
        body = urllib.parse.urlencode(parameters).encode() if parameters else None
        with urllib.request.urlopen(f"http://{self._address}/api/v1/{endpoint}", body, timeout=60) as reply:
            return json.loads(reply.read())["data"]

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait(WAIT_S)
        self._log.close()

    def _start(self, *command: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, env={**os.environ, **(environ or {})})

    def _is_ready(self) -> bool:
        assert self._processes[0].poll() is None, Path(self._log.name).read_text()
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5):
                return True
        except OSError:
            return False
