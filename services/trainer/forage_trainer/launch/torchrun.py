"""`python -m forage_trainer.launch.torchrun [option …] -m forage_trainer …`: torchrun with the exit code of rank 0.

torchrun itself exits with 1 whatever its processes exited with, so that nobody could tell wrong settings (2) from a
failure that another start may cure.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

_ENDED_BY_TORCHRUN = (128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Run the processes until they end; returns the exit code of rank 0, or 128 + the signal that stopped all."""
    try:
        run(parse_args(list(arguments)))
    except ChildFailedError as error:
        return find_exit_code(error.failures)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def find_exit_code(failures: Mapping[int, ProcessFailure]) -> int:
    """Find the exit code of rank 0; where rank 0 was only stopped because another rank had failed, that of the other.

    Args:
        failures: by rank, those that torchrun ended included.
    """
    leader = failures.get(0)
    if leader is not None and leader.exitcode not in _ENDED_BY_TORCHRUN:
        code: int = leader.exitcode
    else:
        code = min(failures.values(), key=lambda failure: failure.timestamp).exitcode
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
