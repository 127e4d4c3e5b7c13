"""`python -m forage_reward.isolation.user_process FD NAME PATH ENTRY_POINT FUNCTION MEMORY_MIB`: runs one user reward.

It reports whether the function could be loaded, then answers each call with a score.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

from forage_common.v1 import reward_pb2
from forage_reward.isolation.child import ParentConnection
from forage_reward.isolation.user_code import UserFunction, call_user_function, load_function
from forage_reward.score import Status, withhold_score
from forage_reward.wire import read_params, read_truth, read_view, to_proto

OUT_OF_MEMORY = 137
"""The exit code after a MemoryError: the function may have left inconsistent state, so its process ends with it."""


def main() -> None:
    descriptor, name, path, entry_point, function_name, memory_mib = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what the function prints goes to the log
    parent = ParentConnection(int(descriptor))
    limit_memory(int(memory_mib) * 2**20)
    with parent.report_start():
        function = load_function(path, entry_point, function_name)
    while (frame := parent.receive()) is not None:
        parent.send(_answer(name, function, frame))


def _answer(name: str, function: UserFunction, frame: bytes) -> bytes:
    call = reward_pb2.UserRewardCall.FromString(frame)
    try:
        score = call_user_function(
            name, function, read_view(call.item), read_truth(call.item), read_params(call.params)
        )
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    try:
        return to_proto(score).SerializeToString()
    except (UnicodeEncodeError, ValueError) as error:  # a name or detail with a lone surrogate is not UTF-8
        failure = withhold_score(Status.INTERNAL, name, f"its score cannot be sent: {type(error).__name__}")
        return to_proto(failure).SerializeToString()


def limit_memory(growth_bytes: int) -> None:
    """Limit the address space of this process to its present size plus `growth_bytes`, and disable core dumps."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + growth_bytes, size + growth_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
