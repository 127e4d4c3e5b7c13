"""What a process logs, as its terminal gets it."""

from __future__ import annotations

import json
import subprocess
import sys

_LOGS = """
import logging, warnings
from forage_runtime.telemetry.logs import configure_logs, get_logger
configure_logs("tester")
get_logger().warning("it\\nhappened", text="\\x1b[2J\\x9b\\u202e\\n{}", url="redis://u:S3cr3t@h:1/0", more={"a": ["https://S3cr3t@h"]},
                     error=ValueError("no answer from https://u:S3cr3t@h/?sig=S3cr3t"))
try:
    raise ValueError("of\\nredis://:S3cr3t@h:1")
except ValueError:
    get_logger().exception("failed")
    logging.getLogger("grpc").exception("from a\\nlibrary: %s", "https://S3cr3t@h")
    logging.getLogger("grpc").error("[bold]\\x1b[2J")
"""


def test_a_log_line_is_one_object_whatever_is_logged() -> None:
    """Also what libraries log: gRPC's tracebacks have many lines."""
    done = subprocess.run([sys.executable, "-c", _LOGS], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == [
        "it\nhappened",
        "failed",
        "from a\nlibrary: https://***@h",
        "[bold]\x1b[2J",
    ]
    assert {line["service"] for line in lines} == {"tester"}
    assert {line["level"] for line in lines} == {"warning", "error"}
    assert "Traceback" in lines[1]["exception"]
    assert "Traceback" in lines[2]["exception"]
    assert "S3cr3t" not in done.stderr
    assert done.stderr.isascii()
    assert "\x1b" not in done.stderr
