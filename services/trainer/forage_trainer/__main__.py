"""`python -m forage_trainer [--config FILE] [key.key=value …]`: train, then exit 0.

Under `python -m torch.distributed.run --nproc-per-node N -m forage_trainer …` N processes share the work. With
`trainer.nnodes` or `trainer.n_gpus_per_node` above 1 the processes are actors of a Ray cluster that this process joins
or starts. Only rank 0 talks to Redis and publishes.

Exit codes: 2 with one sentence where the input or the machine is at fault or a guard stopped the run, 3 when a guard
rolled the run back (the next start resumes), 143 when stopped by SIGTERM, 1 otherwise.
"""

from __future__ import annotations

import os
import signal
import sys

# Set before torch is loaded: OpenMP threads that spin while they wait starve every process on the same cores, their
# own included (two threads beside two busy processes: an update of 5 s takes 20 s and more).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from forage_records.training import list_training_checks
from forage_runtime import service
from forage_runtime.errors import UserError
from forage_runtime.problems import require_all
from forage_runtime.settings import Settings
from forage_runtime.stop import Stop
from forage_trainer.device import check_gpus, prepare_device
from forage_trainer.run import run_follower, run_leader


def main(settings: Settings) -> None:
    """Run this process as the leader or a follower, or start all of them on Ray."""
    launched = "RANK" in os.environ
    on_gpu = prepare_device(settings.trainer)
    if settings.trainer.uses_ray:
        if launched:
            raise UserError(
                "torchrun started this process, and the settings ask for Ray (trainer.ray.address, trainer.nnodes, "
                "trainer.n_gpus_per_node): start it without torchrun, or leave these out"
            )
        require_all(list_training_checks(settings))
        from forage_trainer.launch.ray_launcher import launch

        sys.exit(launch(settings))
    if on_gpu:
        import torch

        check_gpus(torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if launched and os.environ["RANK"] != "0":
        # torchrun signals every process. The leader decides where a step may stop, and its end ends the followers.
        run_follower(settings, on_built=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
        return
    stop = Stop()
    stop.install_handler()
    sys.exit(run_leader(settings, stop))


if __name__ == "__main__":
    service.run_service("trainer", main)
