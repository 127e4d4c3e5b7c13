"""The record of acts that change what is served: who published, swapped, paused, updated, and when."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forage_common.telemetry.logs import get_logger

_lock = threading.Lock()


def record_act(act: str, actor: str, file: Path | None = None, **details: Any) -> None:
    """Log an act as `audit`, and append it to security.audit_file.

    A file that cannot be written is logged as an error and stops nothing.

    Args:
        act: verb and object: publish_policy, swap_index, pause_engines, …
        actor: service or caller: its certificate's name, its token's fingerprint, or its address.
    """
    record = {"time": datetime.now(UTC).isoformat(), "act": act, "actor": actor, **details}
    get_logger().info("audit", **{name: value for name, value in record.items() if name != "time"})
    if file is None:
        return
    try:
        with _lock, file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, default=str) + "\n")
    except OSError as error:
        get_logger().error("audit_file_failed", file=str(file), detail=str(error))
