"""lab/documented.py runs the lines of a page with a command of its own making."""

from __future__ import annotations

from pathlib import Path

import pytest
from documented import Reader, Result

COMMAND = """\
#!/bin/sh
case "$1" in
  status) exit 0 ;;
  up) trap 'exit 0' INT; echo ready; while :; do sleep 0.1; done ;;
  write) echo made > "$3" ;;
  show) cat "$2" ;;
  data) mkdir -p data/world; exit 0 ;;
  *) echo "cannot $1"; exit 1 ;;
esac
"""
PAGE = """\
```yaml title="folder/mine.yaml"
run: {seed: 1}
```

```yaml
run: {sed: 1}
```

```
forage show folder/mine.yaml
export NAME=kept.txt
forage write to $NAME
forage write -o written.txt
forage show written.txt -o other.txt
forage fail
forage up
forage status
kubectl get pods
```
"""


@pytest.fixture
def results(tmp_path: Path) -> dict[str, Result]:
    page, command = tmp_path / "page.md", tmp_path / "bin/forage"
    page.write_text(PAGE)
    command.parent.mkdir()
    command.write_text(COMMAND)
    command.chmod(0o755)
    reader = Reader(tmp_path / "reader", command)
    done = list(reader.read_page(page))
    assert reader.serving == []
    assert (tmp_path / "reader/kept.txt").is_file(), "variables stay for the next line"
    return {result.text: result for result in done}


def test_each_line_has_its_result(results: dict[str, Result]) -> None:
    outcomes = {text: (result.outcome, result.code) for text, result in results.items()}
    assert outcomes == {
        "run: {seed: 1}": ("passed", None),
        "run: {sed: 1}": ("failed", None),
        "forage show folder/mine.yaml": ("passed", 0),
        "export NAME=kept.txt": ("passed", 0),
        "forage write to $NAME": ("passed", 0),
        "forage write -o written.txt": ("passed", 0),
        "forage show written.txt -o other.txt": ("failed", 0),
        "forage fail": ("failed", 1),
        "forage up": ("passed", 0),
        "forage status": ("passed", 0),
        "kubectl get pods": ("left", None),
    }


def test_the_last_line_and_the_reason_are_told(results: dict[str, Result]) -> None:
    assert results["forage show folder/mine.yaml"].last == "run: {seed: 1}"
    assert results["forage fail"].last == "cannot fail"
    assert results["forage show written.txt -o other.txt"].last == "has not written other.txt"
    assert "run.seed" in results["run: {sed: 1}"].last
