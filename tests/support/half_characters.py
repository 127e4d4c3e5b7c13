"""A run whose texts end with half of a surrogate pair, which no reply can be written with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from console_runs import Demo, write_demo

HALF = "\ud800"


def write_spoiled(folder: Path) -> Path:
    """Write a run whose every text in JSON ends so, but those that name kinds, phases and so on."""
    write_demo(folder, Demo(steps=4, total=4, saved=(2,), validated=(4,)))
    kept = {"uid", "kind", "service", "role", "phase", "status", "label", "action", "data_source", "split"}
    for file in [*folder.glob("*.json*"), *folder.glob("validation/*.json*")]:
        lines = []
        for line in file.read_text().splitlines():
            tree = json.loads(line)
            changed = _spoil(tree)
            lines.append(json.dumps(changed | {name: tree[name] for name in kept & tree.keys()}))
        file.write_text("\n".join(lines) + "\n")
    assert HALF in json.loads((folder / "validation/before.jsonl").read_text().splitlines()[0])["trace_id"]
    return folder


def _spoil(value: Any) -> Any:
    """The same with half of a pair after each text, and after no name."""
    if isinstance(value, str):
        return value + HALF
    if isinstance(value, list):
        return [_spoil(one) for one in value]
    return {name: _spoil(one) for name, one in value.items()} if isinstance(value, dict) else value
