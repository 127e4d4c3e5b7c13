"""Every place where a service waits names the wait, or says beside or above it why it needs no name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from check_structure import list_modules, list_packages

WAITS = {"sleep", "wait", "wait_for"}
"""Functions and methods that wait. Those of these names that do not are in `OTHERS`."""
NAMES = {"waiting", "idling", "named"}
REASON = "# wait: "
_CALL = re.compile(rf"\b({'|'.join(WAITS)})\(")
"""Most files have none, and need not be parsed."""
OTHERS = {"health", "_health", "ready", "_wait_for", "_publication", "_publisher", "_writer", "self"}
"""What has a method of one of these names that only notes something, or that names its own wait."""
EXEMPT = {
    "telemetry/waits.py",
    "telemetry/health.py",
    "forage_runtime/stop.py",  # its callers name the wait
    "deployments/dispatcher.py",  # passes the functions on
}


def find_bare_waits(source: str) -> Iterator[int]:
    """Yield the lines with a wait that has neither a name around it nor a reason beside it."""
    lines = source.splitlines()

    def visit(node: ast.AST, is_named: bool) -> Iterator[int]:
        if isinstance(node, ast.With | ast.AsyncWith):
            is_named = is_named or _is_name(node)
        elif isinstance(node, ast.Call) and _called(node) in WAITS and not is_named and not _is_other(node):
            statement = lines[node.lineno - 2 : (node.end_lineno or node.lineno)]
            if not any(REASON in line for line in statement):
                yield node.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_named)

    yield from visit(ast.parse(source), False)


def _is_name(block: ast.With | ast.AsyncWith) -> bool:
    """Whether a block names a wait, or enters the name into a stack of contexts once it waits."""
    entered = [call for call in ast.walk(block) if _called(call) == "enter_context"]
    return any(_called(call) in NAMES for part in (*block.items, *entered) for call in ast.walk(part))


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_other(node: ast.Call) -> bool:
    """Whether this is no wait: a note of `Health`, an `asyncio.sleep(0)`, or a pause of length 0."""
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if name in OTHERS:
            return True
    return bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0


def test_every_wait_has_a_name_or_a_reason(repository: Path) -> None:
    bare = [
        f"{file.relative_to(repository)}:{line}"
        for package in list_packages(repository)
        for file in list_modules(package)
        if not any(str(file).endswith(one) for one in EXEMPT)
        if _CALL.search(source := file.read_text())
        for line in find_bare_waits(source)
    ]
    assert bare == [], "use telemetry.waits.waiting or idling, or say why not: '# wait: REASON'"


def test_the_check_finds_bare_waits() -> None:
    source = (
        "import time\n"
        "time.sleep(1)\n\n"
        "event.wait()  # wait: one second\n"
        "with waiting('gold', on='x', limit_s=1):\n    event.wait(1)\n"
        "async def f():\n    await asyncio.wait_for(x(), 1)\n    await asyncio.sleep(0)\n"
        "health.wait_for('gold', 'it is far')\n"
    )
    assert list(find_bare_waits(source)) == [2, 8]
