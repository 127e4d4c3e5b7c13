"""The service's own Ray with scripted engines, started once for the tests of a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from forage_rollout.deployments.cluster import LocalCluster
from forage_runtime.settings import ReplicaSettings, Settings

REPLICAS = 2


class ScriptedCluster(LocalCluster):
    """The service's own Ray with the application of `serve_parts`."""

    def deploy(self) -> None:
        from ray import serve
        from serve_parts import build_application

        from forage_rollout.deployments.cluster import get_application_name

        engines = ReplicaSettings(min=REPLICAS, max=REPLICAS)
        serve.run(
            build_application(self._settings, engines), name=get_application_name(self._settings), route_prefix=None
        )


@pytest.fixture(scope="module")
def caller() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # Ray's workers import the scripted deployments by name
        cluster = ScriptedCluster(Settings())
        try:
            cluster.start()
            handle = cluster.get_handle("Dispatcher")
            handle.connect.remote(REPLICAS).result(timeout_s=200)  # before, all go to the first that is there
            yield handle
        finally:
            cluster.stop(5.0)
