"""`python -m forage_reward.isolation.math_process FD CONFINEMENT`: compares mathematical answers with math-verify.

math-verify's own time limit is an alarm signal, which works only in a main thread and not during one long
multiplication. Here it is off, and the caller kills this process at its time limit. What it parses was written by a
model, by a library that evaluates expressions: the process is confined as one of user code.
"""

from __future__ import annotations

import logging
import signal
import sys

from forage_proto.v1 import reward_pb2
from forage_reward.isolation.user_process import OUT_OF_MEMORY
from forage_reward.score import Component, Score, Status, sum_components, withhold_score
from forage_reward.wire import to_proto
from forage_sandbox.child import ParentConnection
from forage_sandbox.confinement import Confinement

MEMORY_MIB = 1536
"""With the library itself."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.WARNING)  # math-verify warns that its time limit is off
    parent = ParentConnection(int(sys.argv[1]), Confinement.from_json(sys.argv[2]))
    with parent.report_start():
        compare_answers("1", ["1"])  # import and first use take seconds, so they come before the first request
    while (frame := parent.receive()) is not None:
        item = reward_pb2.ScoreItem.FromString(frame)
        try:
            score = compare_answers(item.spans[0].text, list(item.ground_truth.targets))
        except MemoryError:
            sys.exit(OUT_OF_MEMORY)
        parent.send(to_proto(score).SerializeToString())


def compare_answers(answer: str, targets: list[str]) -> Score:
    """Return one component `equal`, raw 1 where the answer equals a target; both are parsed as LaTeX."""
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> list[object]:
        reading = [LatexExtractionConfig(boxed_match_priority=0)]
        expressions: list[object] = parse(f"\\boxed{{{text}}}", reading, parsing_timeout=None)
        return expressions

    golds = [gold for target in targets if (gold := read(target))]
    if not golds:
        return withhold_score(Status.INVALID_INPUT, "math", "no target can be read as a mathematical expression")
    expressions = read(answer)
    equal = bool(expressions) and any(verify(gold, expressions, timeout_seconds=None) for gold in golds)
    return sum_components("math", (Component("equal", float(equal), float(equal)),), "")


if __name__ == "__main__":
    main()
