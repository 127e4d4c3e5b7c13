"""When a run validates: held-out questions and watched training questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from forage_proto.v1.trajectory_pb2 import Policy
from forage_records.events import EventKind, EventLog
from forage_records.questions import Question
from forage_runtime.settings import Settings
from forage_trainer.checkpoints.manifest import Stateful
from forage_trainer.validation.evaluation import Validation, name_watch

_WATCH = 0x3A7C


def choose_watched(questions: Sequence[Question], settings: Settings) -> list[Question]:
    """Choose the training questions to watch: by `run.seed`, the same ones for as long as the files are the same."""
    order = np.random.default_rng([settings.run.seed, _WATCH]).permutation(len(questions))
    return [questions[place] for place in sorted(order[: settings.trainer.watch_questions.count].tolist())]


class Validations:
    """The validations of a run: of held-out questions, and of watched ones where the settings have an interval."""

    def __init__(
        self,
        settings: Settings,
        build: Callable[[Sequence[Question]], Validation],
        train: Sequence[Question],
        held_out: Sequence[Question],
        record: Callable[[dict[str, Any]], object],
        events: EventLog,
    ) -> None:
        """
        Args:
            build: builds the validation of some questions.
            record: called with every result of held-out questions.
        """
        self._trainer = settings.trainer
        self._held_out = build(held_out)
        self._watched = build(choose_watched(train, settings)) if settings.trainer.watch_questions.freq else None
        self._every = [one for one in (self._held_out, self._watched) if one is not None]
        self._record = record
        self._events = events

    @property
    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint must hold."""
        return dict(zip(("validation", "watch"), self._every, strict=False))

    @property
    def open_versions(self) -> set[int]:
        """Policy versions whose validation is in progress."""
        return set().union(*(one.open_versions for one in self._every))

    def scores(self) -> dict[int, float]:
        """See `Validation.scores`."""
        return self._held_out.scores()

    def is_due(self, step: int) -> bool:
        """Whether a validation follows this step. Such a step has a checkpoint too, which may be the best one."""
        return self._is_validated(step) or self._is_watched(step)

    def begin_first(self, policy: Policy, meanwhile: Callable[[], object]) -> None:
        """Validate the initial policy.

        Args:
            meanwhile: called while the first answers are awaited, if any are.
        """
        if self._is_watched(policy.version):
            self._begin_watch(policy)
        if self._trainer.val_before_train:
            self._held_out.begin("before", policy)
            meanwhile()
            self._finish(self._held_out)
        if not self._overlaps:
            self.finish()

    def begin(self, policy: Policy) -> None:
        """Begin what follows a step, if anything, and wait for it unless it overlaps with training."""
        if not self.is_due(policy.version):
            return
        if self._is_validated(policy.version):
            self._finish(self._held_out)
            self._held_out.begin(f"step-{policy.version}", policy)
        if self._is_watched(policy.version):
            self._begin_watch(policy)
        if not self._overlaps:
            self.finish()

    def end(self, policy: Policy) -> None:
        """Validate the last policy."""
        self.finish()
        if self._watched is not None:
            self._begin_watch(policy)
        self._held_out.begin("after", policy)
        self.finish()

    def poll(self) -> None:
        """Take what has arrived, while training continues."""
        for one in self._every:
            self._take(one, one.poll())

    def finish(self) -> None:
        """Wait for what is in progress."""
        for one in self._every:
            self._finish(one)

    def resume(self) -> None:
        """Open what was in progress in the restored checkpoint."""
        for one in self._every:
            one.resume()

    @property
    def _overlaps(self) -> bool:
        return self._trainer.validation_mode == "overlapped"

    def _is_validated(self, step: int) -> bool:
        frequency = self._trainer.test_freq
        return frequency > 0 and step % frequency == 0 and 0 < step < self._trainer.total_training_steps

    def _is_watched(self, step: int) -> bool:
        frequency = self._trainer.watch_questions.freq
        return frequency > 0 and step % frequency == 0 and step < self._trainer.total_training_steps

    def _begin_watch(self, policy: Policy) -> None:
        assert self._watched is not None
        self._finish(self._watched)
        self._watched.begin(name_watch(policy.version), policy)

    def _finish(self, one: Validation) -> None:
        self._take(one, one.finish())

    def _take(self, one: Validation, result: dict[str, Any] | None) -> None:
        if result is None:
            return
        em = "no EM" if result["em"] is None else f"EM {result['em']:.3f}"
        kind = EventKind.VALIDATION if one is self._held_out else EventKind.WATCH
        self._events.append(kind, f"{result['label']}: {em} of {result['count']} questions", result["version"])
        if one is self._held_out:
            self._record(result)
