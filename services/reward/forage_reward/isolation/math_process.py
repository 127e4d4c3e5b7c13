"""`python -m forage_reward.isolation.math_process FD`: compares mathematical answers with math-verify in a process
that may be killed.

math-verify's own time limit is an alarm signal, which works in a main thread only and not while one long
multiplication runs. Here it is off, and who asks kills this process at the end of its patience.
"""

from __future__ import annotations

import logging
import signal
import sys

from forage_common.v1 import reward_pb2
from forage_reward.isolation.child import Parent
from forage_reward.isolation.user_process import OUT_OF_MEMORY, limit_memory
from forage_reward.score import Component, Score, Status, refused, scored
from forage_reward.wire import to_proto

MEMORY_MIB = 1024


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.WARNING)  # it warns that its time limit is off
    parent = Parent(int(sys.argv[1]))
    compare("1", ["1"])  # imports and first use take seconds: before anybody waits
    limit_memory(MEMORY_MIB * 2**20)
    parent.send(b"")
    while (frame := parent.receive()) is not None:
        item = reward_pb2.ScoreItem.FromString(frame)
        try:
            score = compare(item.spans[0].text, list(item.ground_truth.targets))
        except MemoryError:
            sys.exit(OUT_OF_MEMORY)
        parent.send(to_proto(score).SerializeToString())


def compare(answer: str, targets: list[str]) -> Score:
    """One component `equal`, raw 1 where the answer equals a target, both read as LaTeX."""
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> list[object]:
        reading = [LatexExtractionConfig(boxed_match_priority=0)]
        found: list[object] = parse(f"\\boxed{{{text}}}", reading, parsing_timeout=None)
        return found

    golds = [gold for target in targets if (gold := read(target))]
    if not golds:
        return refused(Status.INVALID_INPUT, "math", "no target can be read as a mathematical expression")
    found = read(answer)
    equal = bool(found) and any(verify(gold, found, timeout_seconds=None) for gold in golds)
    return scored("math", (Component("equal", float(equal), float(equal)),), "")


if __name__ == "__main__":
    main()
