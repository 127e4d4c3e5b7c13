"""Reads files with the code of a service, one after the other, in this process.

    python -m fuzz.programs.reader MODULE            reads a line of JSON {call, name, size} and the content, for each
                                                     file, and answers with a line {outcome, fault, detail}
    python -m fuzz.programs.reader MODULE --good     prints good files: {call, name, content}

MODULE is one of `fuzz.programs`; its `READERS` maps a call to what reads a file, and `list_good_files` makes good ones.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from base64 import b64encode
from pathlib import Path

from forage_runtime.errors import ForageError
from forage_runtime.telemetry.logs import configure_logs


def main(module: str, *options: str) -> None:
    configure_logs("reader", "ERROR")
    program = importlib.import_module(f"fuzz.programs.{module}")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    with tempfile.TemporaryDirectory(prefix="forage-fuzz-") as folder:
        if options:
            for call, name, content in program.list_good_files(Path(folder)):
                print(json.dumps({"call": call, "name": name, "content": b64encode(content).decode()}), file=replies)
            replies.close()
            return
        readers = program.make_readers(Path(folder) / "good")
        where = Path(folder) / "hostile"
        where.mkdir()

        def reply(outcome: str, fault: str = "", detail: str = "") -> None:
            print(json.dumps({"outcome": outcome, "fault": fault, "detail": detail}), file=replies, flush=True)

        reply("ready")
        while line := sys.stdin.buffer.readline():
            asked = json.loads(line)
            content = sys.stdin.buffer.read(asked["size"])
            file = where / Path(asked["name"]).name
            file.write_bytes(content)
            try:
                readers[asked["call"]](file, asked["name"])
            except (ForageError, *program.REFUSALS.get(asked["call"], ())) as error:
                sentence = str(error)
                if "Traceback" in sentence or not sentence:
                    reply(type(error).__name__, "error", f"no sentence: {sentence[:500]!r}")
                else:
                    reply(type(error).__name__)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # noqa: BLE001 - a panic of Rust is no Exception
                reply("exception", "error", traceback.format_exc()[-3000:])
            else:
                reply("read")
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
