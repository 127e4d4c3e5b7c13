"""`python -m forage_reward [--config FILE] [key=value …]`: score trajectories over gRPC until SIGTERM."""

from forage_common.service import run_service
from forage_reward.serve.process import serve

if __name__ == "__main__":
    run_service("reward", serve)
