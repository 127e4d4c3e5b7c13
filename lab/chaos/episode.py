"""An episode: one run from its start to its clean end, struck by a hand of faults, and what that cost."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from chaos.arithmetic import Cost
from chaos.evidence import save_evidence
from chaos.kinds import SUPERVISOR, Arsenal, NothingToStrikeError, Strike
from chaos.recomputation import Recomputation
from chaos.stack import FORAGE, Stack
from chaos.transports import Ways

POLL_S = 0.2
START_S = 400.0
FINISH_S = 300.0
VICTIM_S = 60.0
_LAST_STEPS = 6
_GAP_S = 5.0
_OVERLAP_SHARE = 0.15
_OVERLAP_S = 10.0
_MOST_RESUMES = 3
_STALE_RULES = ("stale", "unannounced", "altered")
_RESTART_ROLES = ("trainer", "rank", "replica", "engine-core", "dispatcher")


@dataclass
class Incident:
    """One strike, or several that overlap, and everything until the next incident."""

    strikes: list[Strike]
    began: float
    first_step: int
    redone_before: int
    processes: dict[str, set[int]]
    cost: Cost | None = None


@dataclass
class Outcome:
    """What an episode ended with.

    Attributes:
        operations: of the run's history, which its own checker has found in order.
        transport: how its policies reached the engines; `ways`: how many took which way.
        recomputed: what was found when its log-probabilities were computed again.
        stale: tokens and loads of another policy than they name, by the history and by what was recomputed.
        problem: why the episode did not end cleanly; empty if it did.
    """

    issued: int = 0
    trained: int = 0
    lost: int = 0
    duplicated: int = 0
    steps: int = 0
    operations: int = 0
    transport: str = ""
    ways: Ways = field(default_factory=Ways)
    recomputed: Recomputation = field(default_factory=Recomputation)
    stale: int = 0
    problem: str = ""


@dataclass
class Tally:
    """What was measured so far, over all episodes."""

    incidents: list[Incident] = field(default_factory=list)
    calm_s: float = 0.0
    calm_steps: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Time of an undisturbed step."""
        return self.calm_s / self.calm_steps if self.calm_steps else 0.0

    @property
    def strikes(self) -> list[Strike]:
        return [strike for incident in self.incidents for strike in incident.strikes]


class EpisodeFailedError(Exception):
    """The run cannot be continued."""


class Episode:
    """Strikes one run with the kinds of a hand, one after the other, and at last kills its supervisor."""

    def __init__(
        self,
        stack: Stack,
        arsenal: Arsenal,
        generator: random.Random,
        tally: Tally,
        hang_s: float,
        say: Callable[[str], None],
        transport: str = "",
    ) -> None:
        self._stack, self._arsenal, self._generator, self._tally = stack, arsenal, generator, tally
        self._hang_s = hang_s
        self._say, self._transport = say, transport
        self._open: list[Strike] = []
        self._incident: Incident | None = None
        self._hangs = 0
        self._resumes = 0
        self._ending: tuple[str, ...] = ()

    def play(self, hand: Sequence[str], calm_s: float, until: float, *settings: str) -> Outcome:
        """Start the run, measure its undisturbed speed, strike it, at most `until` then, and let it end."""
        stack = self._stack
        stack.start(*settings)
        try:
            self._wait(lambda: stack.steps.last >= 2 and stack.is_ready("rollout"), START_S, "the run did not start")
            self._measure_calm(calm_s)
            for kind in hand:
                if time.time() < until:
                    self._strike(kind)
            self._wait_for_recovery()
            return self._finish()
        except EpisodeFailedError as error:
            self._close_incident()
            return Outcome(steps=stack.steps.last, problem=str(error))
        finally:
            for strike in self._open:
                self._lift(strike)
            stack.interrupt()

    def _measure_calm(self, seconds: float) -> None:
        stack = self._stack
        first, began = stack.steps.last, time.time()
        self._wait(lambda: time.time() > began + seconds and stack.steps.last > first, START_S, "no steps")
        last = stack.steps.last
        self._tally.calm_steps += last - first
        self._tally.calm_s += stack.steps.times[last] - stack.steps.times[first]

    def _strike(self, kind: str) -> None:
        if problem := self._arsenal.find_problem(kind):
            self._tally.skipped[kind] = problem
            return
        is_overlapping = bool(self._open) and self._generator.random() < _OVERLAP_SHARE and kind != SUPERVISOR
        if is_overlapping:
            self._pause(self._generator.uniform(0, _OVERLAP_S))
        else:
            self._wait_for_recovery()
            self._pause(self._generator.uniform(0, _GAP_S))
        deadline = time.time() + VICTIM_S
        while True:
            if not self._open:
                self._open_incident()
            try:
                self._begin(kind)
                break
            except NothingToStrikeError as error:
                if time.time() > deadline:
                    self._tally.skipped[kind] = str(error)
                    return
                self._pause(0.5)
        if kind == SUPERVISOR:
            self._stack.wait()
            self._stack.start()

    def _begin(self, kind: str) -> None:
        """
        Raises:
            NothingToStrikeError: what the kind strikes is not there now.
        """
        strike = self._arsenal.strike(kind)
        strike.transport = self._transport
        assert self._incident is not None
        self._incident.strikes.append(strike)
        self._open.append(strike)
        for other in self._open if len(self._open) > 1 else ():
            other.overlaps = True

    def _wait_for_recovery(self) -> None:
        while self._open:
            self._poll()
            time.sleep(POLL_S)

    def _pause(self, seconds: float) -> None:
        deadline = time.time() + seconds
        while time.time() < deadline:
            self._poll()
            time.sleep(POLL_S)

    def _wait(self, condition: Callable[[], bool], timeout_s: float, complaint: str) -> None:
        deadline = time.time() + timeout_s
        while not condition():
            if self._stack.ended is not None:
                raise EpisodeFailedError(f"{complaint}: {self._stack.read_last_words()}")
            if time.time() > deadline:
                save_evidence(self._stack, complaint)
                raise EpisodeFailedError(f"{complaint} within {timeout_s:.0f} s")
            self._poll()
            time.sleep(POLL_S)

    def _poll(self) -> None:
        """Look at everything once: steps, the end of lasting faults, recoveries, hangs, a run that ended itself."""
        stack, now = self._stack, time.time()
        stack.steps.poll()
        for strike in self._open:
            if strike.lift is not None and now >= strike.until:
                self._lift(strike)
        if stack.ended:  # not with 0, which is the end
            self._resume()
        for strike in list(self._open):
            self._watch(strike, now)

    def _lift(self, strike: Strike) -> None:
        if strike.lift is not None:
            with suppress(redis.RedisError, OSError):
                strike.lift()
                strike.lift = None

    def _watch(self, strike: Strike, now: float) -> None:
        steps = self._stack.steps
        if strike.back_s is None and now >= strike.until and strike.is_back():
            strike.back_s = time.time() - strike.until
        if strike.batch is None:
            strike.batch = self._stack.find_batch_after(strike.began)
        is_trained = strike.batch is not None and steps.times.get(strike.batch, 0.0) > strike.began
        if strike.back_s is not None and is_trained:
            # Both are done: the later one counts.
            trained = steps.times[strike.batch or 0]
            strike.recovery_s = max(strike.back_s, trained - strike.until, 0.0)
        elif now > strike.until + self._hang_s:
            strike.hung = True
            self._hangs += 1
            save_evidence(self._stack, strike.kind)
        else:
            return
        self._open.remove(strike)
        self._report(strike)
        if strike.hung:
            if self._hangs > 1:
                raise EpisodeFailedError("a second hang")
            # As a user would: stop it, and continue.
            self._stack.interrupt()
            self._stack.start()
            self._wait(lambda: self._stack.is_ready("trainer"), START_S, "the run did not resume after a hang")

    def _report(self, strike: Strike) -> None:
        times = "hung" if strike.hung else f"back {strike.back_s:5.1f} s  recovery {strike.recovery_s:5.1f} s"
        overlap = "  (overlapping)" if strike.overlaps else ""
        ended = f"  ended: {strike.ended}" if strike.ended else ""
        self._say(f"{strike.kind:22} {times}  step {self._stack.steps.last:4}  {strike.detail}{overlap}{ended}")

    def _resume(self) -> None:
        """Do as a user does whose run ended with a sentence: end the cause, and resume."""
        words = self._stack.read_last_words()
        if self._incident is None or not self._incident.strikes:
            raise EpisodeFailedError(f"the run ended: {words}")
        self._resumes += 1
        if self._resumes > _MOST_RESUMES:
            raise EpisodeFailedError(f"the run ended {self._resumes} times after one fault: {words}")
        for strike in self._open or self._incident.strikes[-1:]:
            strike.ended = strike.ended or words
            strike.until = min(strike.until, time.time())
            self._lift(strike)
        self._stack.start(*self._ending)

    def _open_incident(self) -> None:
        self._close_incident()
        self._resumes = 0
        stack = self._stack
        stack.steps.poll()
        processes = {role: {process.pid for process in stack.find(role)} for role in _RESTART_ROLES}
        self._incident = Incident([], time.time(), stack.steps.last, stack.steps.redone, processes)

    def _close_incident(self, ended: float | None = None) -> None:
        incident, self._incident = self._incident, None
        if incident is None or not incident.strikes:
            return
        stack = self._stack
        stack.steps.poll()
        progress = (stack.steps.last - incident.first_step) * self._tally.step_s
        changed = {role for role, pids in incident.processes.items() if not pids <= {p.pid for p in stack.find(role)}}
        incident.cost = Cost(
            lost_s=(ended or time.time()) - incident.began - progress,
            redone=stack.steps.redone - incident.redone_before,
            restarted_trainer=bool(changed & {"trainer", "rank"}),
            restarted_rollout=bool(changed - {"trainer", "rank"}),
            older_checkpoint=any(strike.kind == "damaged-checkpoint" for strike in incident.strikes),
        )
        self._tally.incidents.append(incident)

    def _finish(self) -> Outcome:
        """Kill the supervisor, let the run take its last steps, and compare what was issued with what was trained."""
        stack = self._stack
        self._pause(self._generator.uniform(0, _GAP_S))
        self._open_incident()
        assert self._incident is not None
        total = stack.steps.last + _LAST_STEPS
        self._begin(SUPERVISOR)
        stack.wait()
        self._ending = (f"trainer.total_training_steps={total}",)
        stack.start(*self._ending)
        deadline = time.time() + FINISH_S
        while stack.ended != 0:
            if time.time() > deadline:
                save_evidence(stack, "the end")
                raise EpisodeFailedError(f"the run did not end within {FINISH_S:.0f} s: {stack.read_last_words()}")
            self._poll()
            time.sleep(POLL_S)
        stack.steps.poll()
        for strike in self._open:  # the run ended before the next look
            strike.back_s = strike.recovery_s = stack.steps.times[stack.steps.last] - strike.began
            self._report(strike)
        self._open.clear()
        self._close_incident(stack.steps.times[stack.steps.last])
        summary: dict[str, Any] = json.loads((stack.run / "summary.json").read_text())
        outcome = Outcome(
            issued=summary["groups_issued"],
            trained=summary["groups_trained"],
            lost=summary["groups_lost"],
            duplicated=summary["groups_duplicated"],
            steps=summary["steps"],
        )
        outcome.operations, outcome.stale, outcome.problem = check_history(stack.run)
        if summary["steps"] != total:
            outcome.problem = f"{summary['steps']} of {total} steps"
        return outcome


def check_history(run: Path) -> tuple[int, int, str]:
    """Verify a run with the checker that does not look at the ledger.

    Returns: operations of its history, those with a policy that they should not have, and what is wrong.
    """
    ended = subprocess.run([*FORAGE, "check-history", str(run), "--complete"], capture_output=True, text=True)
    lines = ended.stdout.splitlines() or ["{}"]
    if ended.returncode:
        stale = sum(f"violated ({rule})" in line for line in lines for rule in _STALE_RULES)
        return 0, stale, f"check-history: {' '.join((ended.stdout + ended.stderr).split())[-1000:]}"
    return int(json.loads(lines[-1])["operations"]), 0, ""
