#!/usr/bin/env bash
# CPython 3.11 (asyncio, Linux): a server of asyncio whose process has no descriptor left for a connection calls the loop's
# exception handler up to `backlog` times in one pass of the loop. `_accept_connection` calls accept() in a loop of `backlog`
# rounds, and after EMFILE logs, stops to read the listening socket and sets a timer of a second, but does not leave the
# loop: each further round fails alike, writes a traceback and sets another timer. When these fire, the socket is read again
# for each of them, and it repeats. With backlog=1000 one waiting client is a thousand tracebacks a second.
# Expected: one line, and no further attempt until the second is over.
# Exit code: 0 as described, 1 changed, 2 no Python 3.11 here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
command -v python3.11 >/dev/null || { echo "needs python3.11"; exit 2; }
cat > "$folder/serve.py" <<'P'
import asyncio
import errno
import os
import socket

BACKLOG = 1000
passes, numbers = 0, []


async def main():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: numbers.append((passes, context["exception"].errno)))
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, backlog=BACKLOG)
    client = socket.create_connection(server.sockets[0].getsockname())  # waits in the kernel's queue
    held = []
    while True:
        try:
            held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            break
    count_passes(loop)
    await asyncio.sleep(0.5)  # less than the second after which it tries again
    for descriptor in held:
        os.close(descriptor)
    client.close()


def count_passes(loop):
    global passes
    passes += 1
    loop.call_soon(count_passes, loop)


asyncio.run(main())
first = [number for number, _ in numbers]
assert {error for _, error in numbers} == {errno.EMFILE}
print(f"{len(numbers)} calls of the exception handler in {len(set(first))} pass of the loop, for 1 waiting client")
P
seen=$(ulimit -n 64; python3.11 "$folder/serve.py")
python3.11 --version
echo "$seen"
[ "$seen" = "1000 calls of the exception handler in 1 pass of the loop, for 1 waiting client" ] || { echo "changed"; exit 1; }
