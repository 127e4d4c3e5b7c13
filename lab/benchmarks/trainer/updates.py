"""The same updates of the tiny policy by the trainer's worker and by plain PyTorch, in turns.

`python updates.py GROUPS ROUNDS key=value …` prints one line a round: `{"rows": …, "tokens": …, "longest": …,
"seconds": {"trainer": [on the clock, of the processor], …}}`.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import batch as made
from plain import PlainActor, split_rows

from forage_runtime.settings import Settings, load_settings
from forage_trainer.algorithms.estimators.grpo import grpo_outcome
from forage_trainer.engine.cpu_engine import CACHE_TOKENS, cut_micro_batches
from forage_trainer.engine.policy_worker import PolicyWorker

REPOSITORY = Path(__file__).resolve().parents[3]
PADDED_ROWS = 16
Update = Callable[[], tuple[float, float]]
"""→ (loss, norm of the gradient)."""


class Updates:
    """Every way of taking the step, each with a policy of its own.

    rows, tokens: of the step; longest: tokens of its longest row.
    """

    def __init__(self, settings: Settings, groups: int) -> None:
        algorithm, actor = settings.trainer.algorithm, settings.trainer.actor
        batch = made.tensors(groups, algorithm)
        worker = PolicyWorker(settings)
        advantages = grpo_outcome(batch.token_rewards, batch.mask, batch.uids)
        reference = worker.reference_log_probs(batch)
        assert reference is not None
        rows = split_rows(batch, advantages, reference)
        lengths = [len(row.ids) for row in rows]
        self.tokens, self.rows, self.longest = sum(lengths), len(rows), max(lengths)
        same = cut_micro_batches(lengths, min(CACHE_TOKENS, actor.ppo_max_token_len_per_gpu))
        fixed = [list(range(first, first + PADDED_ROWS)) for first in range(0, len(rows), PADDED_ROWS)]

        def trainer() -> tuple[float, float]:
            result = worker.update(batch, advantages, reference, None, groups)
            return result.loss, result.grad_norm

        def plain(cuts: list[list[int]], width: int, entropy: bool) -> Update:
            cap = algorithm.rollout_correction.rollout_is_threshold
            policy = PlainActor(Path(settings.model.path), actor, cap, entropy)
            return lambda: policy.update(rows, cuts, width)

        self._ways: dict[str, Update] = {
            "trainer": trainer,
            "plain": plain(same, 0, entropy=True),
            "plain, no entropy": plain(same, 0, entropy=False),
            "padded": plain(fixed, self.longest, entropy=True),
        }

    def warm_up(self) -> None:
        """The first update of each, which must be the same update."""
        result = {name: update() for name, update in self._ways.items()}
        for name, measured in result.items():
            if not all(map(lambda one, two: math.isclose(one, two, rel_tol=1e-3), measured, result["trainer"])):
                sys.exit(f"{name} takes another update: loss and gradient norm {measured}, trainer {result['trainer']}")

    def round(self, number: int) -> dict[str, tuple[float, float]]:
        """Every way once, every other time from the last to the first. Its name → seconds, processor seconds."""
        result = {}
        for name in sorted(self._ways, reverse=bool(number % 2)):
            began, cpu = time.perf_counter(), time.process_time()
            self._ways[name]()
            result[name] = time.perf_counter() - began, time.process_time() - cpu
        return result


def main(groups: int, rounds: int, overrides: Sequence[str]) -> None:
    updates = Updates(load_settings(REPOSITORY / "configs/demo.yaml", overrides, environ={}), groups)
    updates.warm_up()
    shape = {"rows": updates.rows, "tokens": updates.tokens, "longest": updates.longest}
    for number in range(rounds):
        print(json.dumps(shape | {"seconds": updates.round(number)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
