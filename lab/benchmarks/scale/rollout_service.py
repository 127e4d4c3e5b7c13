"""The rollout's Ray Serve application with stub engines: real dispatchers, agents and calls between them.

    python rollout_service.py SETTINGS_FILE

A line of its stdin asks: `counts` for those of all replicas, `waits` for what they wait for. The answer is a line of
JSON; the end of its stdin ends it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from forage_rollout.deployments.cluster import LocalCluster, get_application_name
from forage_rollout.metrics import Snapshot
from forage_runtime.settings import load_settings
from forage_runtime.telemetry.logs import configure_logs

DEPLOYMENTS = ("Engine", "Agent", "Dispatcher")
_SNAPSHOT_S = 120.0


class StubbedCluster(LocalCluster):
    """The service's own Ray with stub engines."""

    def deploy(self) -> None:
        from ray import serve
        from stub_engine import StubDeployment

        from forage_rollout.deployments.application import build_application

        application = build_application(self._settings, StubDeployment)
        serve.run(application, name=get_application_name(self._settings), route_prefix=None)

    def take_counts(self) -> dict[str, dict[str, float]]:
        """Deployment → count → its sum over the replicas."""
        taken: dict[str, dict[str, float]] = {}
        for deployment in DEPLOYMENTS:
            sums = taken[deployment] = {}
            for snapshot in self._take_snapshots(deployment):
                for key, value in snapshot.counts.items():
                    sums[key[0]] = sums.get(key[0], 0.0) + value
        return taken

    def list_waits(self) -> list[dict[str, Any]]:
        """What the replicas wait for, see `telemetry.waits`."""
        return [wait for deployment in DEPLOYMENTS for one in self._take_snapshots(deployment) for wait in one.waits]

    def _take_snapshots(self, deployment: str) -> list[Snapshot]:
        taken: list[Snapshot] = self.get_handle(deployment).broadcast("take_snapshot").results(timeout_s=_SNAPSHOT_S)
        return taken


def main() -> None:
    # Ray's workers import the stub by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    configure_logs("rollout")
    cluster = StubbedCluster(load_settings(Path(sys.argv[1])))
    try:
        cluster.start()
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            print(json.dumps(cluster.list_waits() if line.strip() == "waits" else cluster.take_counts()), flush=True)
    finally:
        cluster.stop(10.0)


if __name__ == "__main__":
    main()
