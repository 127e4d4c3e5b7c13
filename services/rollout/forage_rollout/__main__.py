"""`python -m forage_rollout [--config FILE] [key=value …]`: sample trajectories with vLLM until SIGTERM."""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # read when gRPC is imported; Ray starts its processes by fork

from forage_rollout.serve.server import main
from forage_runtime.service import run_service

if __name__ == "__main__":
    run_service("rollout", main)
