"""`python ray_cluster.py`: a Ray cluster of two nodes with a CPU each, on loopback, until stdin ends; says its address.

They share this machine and nothing else: processes, addresses, resources are a node's own.
"""

from __future__ import annotations

import os
import sys

from ray.cluster_utils import Cluster

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 2,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name: on loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "300",
}
NODES = ("127.0.0.1", "127.0.0.2")
_STARTS = 5


def main() -> None:
    assert os.environ.items() >= ENVIRONMENT.items(), "Ray reads it when it is imported"
    cluster = Cluster()
    for address in NODES:
        for attempt in range(_STARTS):
            try:
                cluster.add_node(
                    num_cpus=1, node_ip_address=address, object_store_memory=80 * 2**20, include_dashboard=False
                )
                break
            except Exception:
                # A busy machine lets Ray's own fixed time limits pass; it raises bare Exceptions.
                if attempt == _STARTS - 1:
                    raise
    sys.stdout.write(cluster.address + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
