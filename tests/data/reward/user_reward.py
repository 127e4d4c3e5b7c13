"""A user reward that does what its item's first target says."""

import os
import signal
import time


def score(view, truth, params):
    order = truth.targets[0]
    if order == "value":
        return {"right": 1.0, "half": 0.5, "_log": 7.0, "param": float(params.get("extra", 0.0))}
    if order == "number":
        return 3
    if order == "hang":
        time.sleep(3600)
    if order == "spin":
        while True:
            pass
    if order == "exit":
        os._exit(7)
    if order == "quit":
        raise SystemExit(0)
    if order == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if order == "memory":
        return len(bytearray(2**33))
    if order == "raise":
        raise RuntimeError("no such thing")
    if order == "print":
        print("not a frame", flush=True)  # noqa: T201 - what a user's code may do
        return 1.0
    if order == "pid":
        return float(os.getpid())
    return {"none": None, "text": "1.0", "nan": float("nan"), "bool": True, "list": [1.0], "inf": float("inf")}[order]
