"""`python -m forage_trainer [--config FILE] [key.key=value …]`: train, then exit 0.

Under `python -m torch.distributed.run --nproc-per-node N -m forage_trainer …` N processes share the work, and with
`trainer.nnodes` or `trainer.n_gpus_per_node` above 1 as many actors of a Ray that this process joins or starts; the
first of them alone talks to Redis and publishes.

Exit codes: 2 with one sentence where the input or the machine is at fault or a guard stopped the run, 3 when a guard
rolled it back (the next start goes on), 143 when stopped by SIGTERM, 1 otherwise.
"""

from __future__ import annotations

import os
import signal
import sys

# Before torch is loaded: OpenMP threads that spin while they wait starve whatever shares the cores, themselves
# included (two threads beside two busy processes: an update of 5 s takes 20 s and more).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from forage_common import service
from forage_common.errors import UserError
from forage_common.settings import Settings
from forage_trainer.run import check_settings, follow, lead
from forage_trainer.waiting import Stop


def main(settings: Settings) -> None:
    """Lead, follow, or have Ray start those who do."""
    launched = "RANK" in os.environ
    if settings.trainer.uses_ray:
        if launched:
            raise UserError(
                "torchrun started this process, and the settings ask for Ray (trainer.launcher, trainer.ray.address, "
                "trainer.nnodes, trainer.n_gpus_per_node): start it without torchrun, or set trainer.launcher=process"
            )
        check_settings(settings)
        from forage_trainer.launch.ray_launcher import launch

        sys.exit(launch(settings))
    if launched and os.environ["RANK"] != "0":
        # The launcher signals all processes; the first decides when a step may end, and its own end ends this one.
        follow(settings, built=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
        return
    stop = Stop()
    stop.on_signals()
    sys.exit(lead(settings, stop))


if __name__ == "__main__":
    service.run_service("trainer", main)
