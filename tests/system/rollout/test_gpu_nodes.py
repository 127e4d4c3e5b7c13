"""A Ray cluster gets its GPU node after the service has asked for it, as with KubeRay; its GPUs are only counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import concurrent.futures, sys, time
from ray.cluster_utils import Cluster
from forage_runtime import devices as common
from forage_runtime.settings import ReplicaSettings, load_settings
from forage_runtime.telemetry.logs import configure_logs
from forage_runtime.telemetry.waits import list_waits
from forage_rollout.deployments import application, devices
from forage_rollout.deployments.cluster import open_cluster

for module in (common, devices):
    module.find_cuda_version = lambda *_: "13.0"  # vLLM as it is installed for GPUs
configure_logs("rollout")
small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
nodes = Cluster()
nodes.add_node(num_cpus=4, num_gpus=0, node_ip_address="127.0.0.1", **small)
engines = ["rollout.engine.tensor_parallel_size=2", "rollout.engine_replicas={min: 2, max: 2}"]
settings = load_settings(None, [f"rollout.ray_address={nodes.address}", *engines], {})

import serve_parts

class Placed(serve_parts.ScriptedDeployment):
    async def place(self):
        import ray
        return ray.util.get_node_ip_address(), sorted(ray.get_gpu_ids())

serve_parts.ScriptedDeployment = Placed
application.build_application = lambda given: serve_parts.build_application(
    given, given.rollout.engine_replicas, gpus=devices.count_gpus(given.rollout)
)
cluster = open_cluster(settings)
starting = concurrent.futures.ThreadPoolExecutor().submit(cluster.start)
deadline = time.monotonic() + 280
while not (details := [wait["detail"] for wait in list_waits() if wait["on"] == "ray" and wait["detail"]]):
    assert not starting.done(), starting.result()
    assert time.monotonic() < deadline, list_waits()
    time.sleep(0.1)
print(details[0], flush=True)
nodes.add_node(num_cpus=1, num_gpus=4, node_ip_address="127.0.0.2", **small)
starting.result(timeout=280)
print(sorted(cluster.get_handle("Dispatcher").everywhere.remote("place").result(timeout_s=280)), flush=True)
cluster.stop(10.0)
nodes.shutdown()
"""


def test_replicas_wait_visibly_for_a_gpu_node_and_get_their_gpus_on_it(tmp_path: Path) -> None:
    from ray_cluster import ENVIRONMENT

    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "4 GPU(s) for 2 engine(s): Ray's 1 node(s) have 0",
        "[('127.0.0.2', [0, 1]), ('127.0.0.2', [2, 3])]",
    ], done.stderr[-4000:]
    assert "waiting_for_gpus" in done.stderr
