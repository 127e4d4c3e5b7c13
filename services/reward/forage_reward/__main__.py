"""`python -m forage_reward [--config FILE] [key=value …]`: score trajectories over gRPC until SIGTERM."""

from forage_reward.serve.service_process import serve
from forage_runtime.service import run_service

if __name__ == "__main__":
    run_service("reward", serve)
