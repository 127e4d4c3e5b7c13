"""Runs that attack the reader, that are broken, and that go on, for the tests of the console in a browser."""

from __future__ import annotations

import json
from pathlib import Path

from console_runs import Demo, Question, answer_greedily, list_questions, write_demo

HOSTILE = (
    "<script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 2">',
    '"><svg onload="window.hacked = 3">',
    "javascript:window.hacked = 4",
    "\u202egnirts desrever \u2066\u0000 null",
    "מי כתב את זה? من كتب هذا؟",
    "W" * 5000,
    "{{constructor.constructor('window.hacked = 5')()}} ${window.hacked = 6} %3Cscript%3E",
)
HOSTILE_RUN = "a'\"><img src=x onerror=hacked(7)>"
LONG = "a long thought, again and again; " * 32_000
LIVE = Demo(steps=3, total=8, saved=(2, 4), validated=(), watched=())


def write_hostile(folder: Path) -> None:
    """A run in which every text that a policy, a question, a corpus or a colleague can write is an attack."""
    questions = [Question(f"{text} ?", f"{text} x", text[:500], ((text, text),) * 2, text, text) for text in HOSTILE]
    demo = Demo(steps=2, total=2, saved=(2,), validated=(), watched=(2,), groups=len(HOSTILE), questions=questions)
    write_demo(folder, demo)
    with (folder / "validation/before.jsonl").open("a") as file:
        long = answer_greedily(demo, 0, 0) | {"uid": "world_facts/test/99/0", "answer": LONG, "question": LONG}
        file.write(json.dumps(long | {"spans": [{"role": "model", "text": LONG}]}) + "\n")
    settings = folder / "settings.yaml"
    settings.write_text(settings.read_text() + "'<b onclick=hacked(8)>': '<script>hacked(9)</script>'\n")
    (folder / "notes.json").write_text(
        '{"note": "<script>hacked(10)</script>", "tags": ["<img src=x onerror=hacked(11)>"]}'
    )
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time": 5, "kind": "<i>guard</i>", "text": "<script>hacked(12)</script>", "step": 5}\n')


def write_broken(folder: Path) -> None:
    """`broken` has no readable settings, `half` is in the middle of every write."""
    small = Demo(steps=4, total=40, saved=(2, 4), validated=(2,), watched=(), questions=list_questions()[:3])
    write_demo(folder / "broken", small)
    (folder / "broken/settings.yaml").write_text("run: {id: [")
    half = write_demo(folder / "half", small)
    for name in ("metrics.jsonl", "validation/before.jsonl", "trajectories/step-000002.parquet", "events.jsonl"):
        file = half / name
        file.write_bytes(file.read_bytes()[:-40])
    (half / "state.json").write_text('{"phase": "trai')
    (half / "validation/step-2.json").write_text('{"em":')
