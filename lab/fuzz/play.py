"""Sends the inputs of one wire to its target: counts, time limits, health in between, memory, failing inputs kept."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fuzz import targets
from fuzz.inputs import Fault, Input, Verdict
from fuzz.targets import Target

CHECK_S = 1.0
"""Pause between two looks at the target's health while inputs are sent."""

WARM_UP = 0.3
"""Share of the inputs after which memory is measured for the first time."""

MAY_GROW_BYTES = 64 * 2**20
"""Growth of resident memory between then and the end: what allocators and bounded caches keep, not a leak per input."""

_SAVED = 10
_SAVED_PER_KIND = 2
_END_S = 120.0
_MINIMISE_S = 20.0
_MINIMISE_SENDS = 60


@dataclass
class Result:
    """What was found on a wire.

    Attributes:
        outcomes: status or outcome → how often.
        saved: files of failing inputs.
        problems: sentences, one for each kind of failure at most.
    """

    wire: str
    inputs: int = 0
    crashes: int = 0
    errors: int = 0
    hangs: int = 0
    grown_bytes: int = 0
    seconds: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.crashes or self.errors or self.hangs) and self.grown_bytes <= MAY_GROW_BYTES

    def to_row(self) -> dict[str, Any]:
        return asdict(self)


class Play:
    """One run over a wire.

    Args:
        failures: folder for failing inputs.
        report: called every second with the result so far.
        until: Unix time after which no more inputs are sent.
    """

    def __init__(
        self,
        wire: str,
        target: Target,
        concurrency: int,
        failures: Path,
        report: Callable[[Result], None],
        until: float = math.inf,
    ) -> None:
        self._target = target
        self._concurrency = concurrency
        self._failures = failures
        self._report = report
        self._until = until
        self._result = Result(wire)
        self._outcomes: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._flying: set[Input] = set()
        self._recent: deque[Input] = deque(maxlen=concurrency)
        """Answered last: a process may end just after it has closed a connection."""
        self._mending = asyncio.Lock()
        self._over = False

    async def run(self, inputs: Iterator[Input], count: int) -> Result:
        """Send so many inputs; restarts the target where one has ended it."""
        began = time.monotonic()
        await self._target.start()
        watching = asyncio.create_task(self._watch(began))
        try:
            first = max(self._concurrency, int(count * WARM_UP))
            await self._send_all(itertools.islice(inputs, first))
            before = self._measure_memory()
            await self._send_all(itertools.islice(inputs, max(0, count - first)))
            await self._settle()
            self._result.grown_bytes = max(0, self._measure_memory() - before)
        finally:
            self._over = True
            watching.cancel()
            await self._target.close()
            for process in self._target.processes:
                process.end()
        self._result.outcomes = dict(self._outcomes.most_common())
        self._result.seconds = time.monotonic() - began
        if self._result.grown_bytes > MAY_GROW_BYTES:
            self._result.problems.append(
                f"memory grew by {self._result.grown_bytes / 2**20:.0f} MiB after the warm-up, of "
                f"{MAY_GROW_BYTES / 2**20:.0f} MiB that it may"
            )
        return self._result

    async def send_one(self, one: Input) -> Verdict:
        """Send one input to a target that was just started, as a replay does."""
        await self._target.start()
        try:
            verdict = await self._target.send(one)
            await asyncio.sleep(0.2)
            if verdict.fault is None and not self._is_alive():
                verdict = Verdict(verdict.outcome, Fault.CRASH, self._target.processes[-1].describe_end())
            if verdict.fault is None and (lines := self._read_bad_lines()):
                verdict = Verdict(verdict.outcome, Fault.ERROR, "\n".join(lines))
            return verdict
        finally:
            await self._target.close()
            for process in self._target.processes:
                process.end()

    async def _send_all(self, inputs: Iterator[Input]) -> None:
        async def work() -> None:
            for one in inputs:
                if time.time() > self._until:
                    return
                self._flying.add(one)
                crashes = self._result.crashes
                try:
                    verdict = await self._target.send(one)
                    self._result.inputs += 1
                    self._outcomes[verdict.outcome or str(verdict.fault)] += 1
                    if verdict.fault is not None or not self._is_alive():
                        await self._take_fault(one, verdict, crashes)
                finally:
                    self._flying.discard(one)
                    self._recent.append(one)

        await asyncio.gather(*(work() for _ in range(self._concurrency)))

    async def _take_fault(self, one: Input, verdict: Verdict, crashes: int) -> None:
        """Count a fault. crashes: how many there had been when the input was sent."""
        suspects = [*self._flying, *self._recent]
        async with self._mending:  # one at a time: others wait for the target to be started again
            if verdict.fault is Fault.CRASH and self._result.crashes > crashes:
                return  # that of another input, which has been counted
            if verdict.fault is Fault.CRASH and not await self._sees_end():
                verdict = Verdict(verdict.outcome, Fault.HANG, verdict.detail)
            has_ended = not self._is_alive()
            if has_ended:
                self._result.crashes += 1
                detail = self._target.processes[-1].describe_end()
                self._note(f"crash: {detail}")
                for suspect in suspects:
                    self._save(suspect, Fault.CRASH, detail)
                await self._target.start()
            if verdict.fault is Fault.ERROR:  # also where another input has ended the process meanwhile
                self._result.errors += 1
                kind = _describe_kind(one, verdict)
                self._kinds[kind] += 1
                if self._kinds[kind] == 1:
                    self._note(f"{one.call} {one.name} answered {verdict.outcome}: {verdict.detail}")
                if self._kinds[kind] <= _SAVED_PER_KIND:
                    smallest = await self._minimise(one, verdict)
                    self._save(smallest, Fault.ERROR, verdict.detail or verdict.outcome)
            elif verdict.fault is Fault.HANG and not has_ended:
                self._result.hangs += 1
                self._note(f"{one.call} {one.name}: {verdict.detail}")
                self._save(one, Fault.HANG, verdict.detail)

    async def _sees_end(self) -> bool:
        """Whether a process that takes no connections ends: on a busy machine it does so a while after it hangs up."""
        deadline = time.monotonic() + _END_S
        while self._is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return not self._is_alive()

    async def _minimise(self, one: Input, verdict: Verdict) -> Input:
        """The input with as many bytes cut off as leave its outcome; within few sends and little time.

        Not a request: a cut one is waited for, since its length says that more will come.
        """
        if len(one.parts) > 1 or not one.size or one.call in ("http", "tcp"):
            return one
        deadline, sends = time.monotonic() + _MINIMISE_S, 0  # lint: short because any content will do
        content, step = one.parts[0], len(one.parts[0]) // 2
        while step >= 1 and sends < _MINIMISE_SENDS and time.monotonic() < deadline:
            for begin in range(0, len(content), step):
                shorter = content[:begin] + content[begin + step :]
                sends += 1
                again = await self._target.send(one.with_parts(shorter))
                if not self._is_alive():
                    return one
                if _describe_kind(one, again) == _describe_kind(one, verdict):
                    content = shorter
                    break
                if sends >= _MINIMISE_SENDS or time.monotonic() > deadline:
                    break
            else:
                step //= 2
        return one.with_parts(content)

    async def _watch(self, began: float) -> None:
        """Look at the target's health, and at its log, until the end."""
        while not self._over:
            await asyncio.sleep(CHECK_S)
            self._result.seconds = time.monotonic() - began
            self._report(self._result)
            if self._mending.locked() or not self._is_alive():
                continue
            try:
                problem = await asyncio.wait_for(self._target.check(), targets.LIMIT_S)
            except TimeoutError:
                problem = f"the health check had no answer within {targets.LIMIT_S:g} s"
            if problem and not self._mending.locked() and self._is_alive():
                self._result.hangs += 1
                self._note(problem)
                for suspect in list(self._flying):
                    self._save(suspect, Fault.HANG, problem)
            self._take_bad_lines()

    async def _settle(self) -> None:
        """A last look at health, process and log after the last input."""
        await asyncio.sleep(0.3)
        if not self._is_alive():
            self._result.crashes += 1
            self._note(f"crash: {self._target.processes[-1].describe_end()}")
        elif problem := await self._target.check():
            self._result.hangs += 1
            self._note(problem)
        self._take_bad_lines()

    def _take_bad_lines(self) -> None:
        for line in self._read_bad_lines():
            self._result.errors += 1
            self._note(f"log: {line[:300]} … {line[-1100:]}" if len(line) > 1400 else f"log: {line}")

    def _read_bad_lines(self) -> list[str]:
        return [line for process in self._target.processes for line in process.find_bad_lines()]

    def _is_alive(self) -> bool:
        return all(process.is_alive for process in self._target.processes)

    def _measure_memory(self) -> int:
        return sum(process.measure_memory() for process in self._target.processes)

    def _note(self, problem: str) -> None:
        if len(self._result.problems) < _SAVED:
            self._result.problems.append(problem[-1500:])

    def _save(self, one: Input, fault: Fault, detail: str) -> None:
        if len(self._result.saved) < 2 * _SAVED:
            self._result.saved.append(str(one.save(self._failures, fault, detail)))


def _describe_kind(one: Input, verdict: Verdict) -> str:
    """What failures that are alike have in common: the call, the outcome, and the type of an exception."""
    last = verdict.detail.strip().rpartition("\n")[2].partition(":")[0][:80]
    return f"{one.call} {verdict.fault} {verdict.outcome} {last}"
