"""Each line of the page on correctness has a test that exists."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_line_has_a_test_that_exists(repository: Path) -> None:
    lines = (repository / "docs/reference/correctness.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    assert len(rows) >= 11
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, name in named:
            assert re.search(rf"^(async )?def {name}\(", (repository / file).read_text(encoding="utf-8"), re.M), name
