"""`python direct_engine.py OPTIONS`: a receiver of the direct transport, which obeys lines of JSON.

OPTIONS: arguments of `DirectReceiver` in JSON. {"port": …, "files": [[name, digest, bytes], …], "folder": …} receives
files; printed are the seconds that it took and why it failed, if it did. {"policy": an announcement in hex, "cache": …}
holds a policy as an engine does; printed are also the paths of its files, and how many folders have been received and
read instead. {"offer": {digest: path}} changes what it sends to other engines, {"gpu": …} makes it claim that GPU.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from forage_proto.v1.trajectory_pb2 import DirectSender, Policy, PolicyFile
from forage_runtime.errors import ForageError
from forage_runtime.telemetry.logs import configure_logs
from forage_weights.cache import PolicyCache
from forage_weights.rollout.direct_receiver import DirectReceiver


def main() -> None:
    """Obey the lines until the input ends."""
    configure_logs("rollout")
    receiver = DirectReceiver(**json.loads(sys.argv[1]))
    caches: dict[str, PolicyCache] = {}
    write_line({})
    for line in sys.stdin:
        order = json.loads(line)
        began, answer = time.perf_counter(), {"failure": ""}
        try:
            if "policy" in order:
                new = PolicyCache(Path(order["cache"]), receive=receiver.receive, offer=receiver.offer)
                cache = caches.setdefault(order["cache"], new)
                answer |= hold(cache, Policy.FromString(bytes.fromhex(order["policy"])))
            elif "files" not in order:
                if receiver._sender is not None:
                    receiver._sender.offer({digest: Path(path) for digest, path in order.get("offer", {}).items()})
                receiver._gpu = order.get("gpu", receiver._gpu)
            else:
                files = [PolicyFile(name=name, digest=digest, bytes=size) for name, digest, size in order["files"]]
                policy = Policy(direct=DirectSender(host="127.0.0.1", port=order["port"]))
                receiver.receive(policy, files, Path(order["folder"]))
        except ForageError as error:
            answer["failure"] = str(error)
        write_line(answer | {"seconds": time.perf_counter() - began})


def hold(cache: PolicyCache, policy: Policy) -> dict[str, Any]:
    """Hold a policy for a moment."""
    with cache.hold(policy) as held:
        files = [str(file) for file in held.files]
    return {"files": files, "received": cache.received, "fallbacks": cache.fallbacks}


def write_line(answer: dict[str, Any]) -> None:
    """Write an answer, one line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
