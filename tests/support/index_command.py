"""`forage index` as a process, for tests; and a corpus of any size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_RUN_ALL = """
import contextlib, io, json, sys
from forage_retriever.command.main import main

outcomes = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, output, errors, code = ["forage index", *arguments], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    outcomes.append((arguments, code or 0, output.getvalue(), errors.getvalue()))
print(json.dumps(outcomes))
"""


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
            command, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=600
        )

    def run_all(self, *commands: Sequence[str | Path]) -> list[subprocess.CompletedProcess[str]]:
        """Run commands one after the other in one process, whose start takes longer than most of them."""
        done = self(json.dumps([[str(word) for word in command] for command in commands]), script=_RUN_ALL)
        assert done.returncode == 0, done.stderr
        return [subprocess.CompletedProcess(*outcome) for outcome in json.loads(done.stdout)]


def write_topics(file: Path, count: int) -> None:
    """Write a corpus of short passages about a few topics, with the filter field `topic`."""
    topics = ["rivers", "stars", "bridges", "birds", "languages", "metals", "islands"]
    with file.open("w") as lines:
        for n in range(count):
            topic = topics[n % len(topics)]
            row: dict[str, Any] = {"id": f"passage-{n}", "contents": f'"{topic} {n}"\nNumber {n} is about {topic}.'}
            lines.write(json.dumps(row | {"topic": topic}) + "\n")
