"""The exit code of several processes is that of rank 0, or of the rank whose failure ended it."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from forage_trainer.launch.torchrun import find_exit_code


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({0: 2, 1: -15}, 2),
        ({1: 1, 0: 2}, 2),  # a follower noticed the end of rank 0 before torchrun did
        ({1: 2, 0: -15}, 2),
        ({1: 1, 0: 143}, 1),
        ({1: -9, 0: 143}, 137),
        ({1: 1, 0: -9}, 1),
        ({0: -9, 1: 1}, 137),
        ({0: 3}, 3),
    ],
)
def test_the_exit_code_is_of_rank_0_unless_it_was_only_stopped(codes: dict[int, int], expected: int) -> None:
    """Failures as torchrun lists them: the first one that it saw comes first."""
    failures = {rank: ProcessFailure(rank, 1, code, "/no/file") for rank, code in codes.items()}
    assert find_exit_code(failures) == expected
