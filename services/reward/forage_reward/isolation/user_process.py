"""`python -m forage_reward.isolation.user_process FD NAME PATH ENTRY_POINT FUNCTION MEMORY_MIB`: runs one user reward.

First it says whether the function could be loaded ("" or a sentence), then it answers each call with a score.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

from forage_common.errors import UserError
from forage_common.v1 import reward_pb2
from forage_reward.isolation.child import Parent
from forage_reward.isolation.user_code import UserFunction, judged, load_function
from forage_reward.score import Status, refused
from forage_reward.wire import params_of, to_proto, truth_of, view_of

OUT_OF_MEMORY = 137
"""The exit code after a MemoryError: whatever the function left half done goes with its process."""


def main() -> None:
    descriptor, name, path, entry_point, function, memory_mib = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what the function prints belongs to the log
    parent = Parent(int(descriptor))
    limit_memory(int(memory_mib) * 2**20)
    try:
        loaded = load_function(path, entry_point, function)
    except UserError as error:
        parent.send(str(error).encode(errors="replace"))
        sys.exit(2)
    parent.send(b"")
    while (frame := parent.receive()) is not None:
        parent.send(_answer(name, loaded, frame))


def _answer(name: str, function: UserFunction, frame: bytes) -> bytes:
    call = reward_pb2.UserRewardCall.FromString(frame)
    try:
        score = judged(name, function, view_of(call.item), truth_of(call.item), params_of(call.params))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    try:
        return to_proto(score).SerializeToString()
    except (UnicodeEncodeError, ValueError) as error:  # a name or detail with a lone surrogate is no UTF-8
        refusal = refused(Status.INTERNAL, name, f"its score cannot be sent: {type(error).__name__}")
        return to_proto(refusal).SerializeToString()


def limit_memory(more: int) -> None:
    """Let this process grow by `more` bytes of address space and no further; leave no core behind."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
