"""`python -m forage_reward.isolation.user_process FD CONFINEMENT NAME PATH ENTRY_POINT FUNCTION`: runs one user reward.

It confines itself, reports whether the function could be loaded, then answers each call with a score.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

from forage_proto.v1 import reward_pb2
from forage_reward.isolation.user_code import GROUP, UserFunction, call_user_function, load_function
from forage_reward.score import Status, withhold_score
from forage_reward.wire import read_params, read_truth, read_view, to_proto
from forage_sandbox.child import ParentConnection
from forage_sandbox.confinement import Confinement
from forage_sandbox.user_files import find_files

OUT_OF_MEMORY = 137
"""The exit code after a MemoryError: the function may have left inconsistent state, so its process ends with it."""


def main() -> None:
    descriptor, confinement_json, name, source = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = find_files(source, GROUP)
    confinement = Confinement.from_json(confinement_json)
    confinement = dataclasses.replace(confinement, read=(*own, *confinement.read))
    if not confinement.is_on:
        os.dup2(2, 1)  # what the function prints goes to the log
    parent = ParentConnection(int(descriptor), confinement)
    with parent.report_start():
        function = load_function(source, confinement)
    while (frame := parent.receive()) is not None:
        parent.send(_answer(name, function, frame, confinement))


def _answer(name: str, function: UserFunction, frame: bytes, confinement: Confinement) -> bytes:
    call = reward_pb2.UserRewardCall.FromString(frame)
    try:
        score = call_user_function(
            name, function, read_view(call.item), read_truth(call.item), read_params(call.params), confinement
        )
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    try:
        return to_proto(score).SerializeToString()
    except (UnicodeEncodeError, ValueError) as error:  # a name or detail with a lone surrogate is not UTF-8
        failure = withhold_score(Status.INTERNAL, name, f"its score cannot be sent: {type(error).__name__}")
        return to_proto(failure).SerializeToString()


if __name__ == "__main__":
    main()
