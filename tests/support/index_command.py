"""`forage index` as a process, for tests; and a corpus of any size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class IndexCommand:
    """Runs `forage index` in a folder, with the repository's cache of encoders."""

    def __init__(self, repository: Path, folder: Path) -> None:
        python = repository / ".venvs/retriever/bin/python"
        self._python = str(python if python.exists() else sys.executable)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FORAGE__")}
        cache = str(repository / ".cache/retriever")
        self._environment = kept | {"OMP_NUM_THREADS": "1", "FORAGE__RETRIEVER__CACHE_DIR": cache}
        self._folder = folder

    def __call__(self, *arguments: str | Path, script: str = "") -> subprocess.CompletedProcess[str]:
        program = ["-c", script] if script else ["-m", "forage_retriever.command"]
        command = [self._python, *program, *map(str, arguments)]
        return subprocess.run(
            command, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=240
        )


def write_topics(file: Path, count: int) -> None:
    """Write a corpus of short passages about a few topics, with the filter field `topic`."""
    topics = ["rivers", "stars", "bridges", "birds", "languages", "metals", "islands"]
    with file.open("w") as lines:
        for n in range(count):
            topic = topics[n % len(topics)]
            row: dict[str, Any] = {"id": f"passage-{n}", "contents": f'"{topic} {n}"\nNumber {n} is about {topic}.'}
            lines.write(json.dumps(row | {"topic": topic}) + "\n")
