"""What lab/documented.py makes of pages: their blocks and lines, and which of these a machine can run."""

from __future__ import annotations

from pathlib import Path

import pytest
from documented import is_shell
from documented_rules import Kind, find_kind, find_reason, list_outputs
from pages import COMMANDS_PAGE, list_pages, read_blocks, read_examples, read_lines

PAGE = """\
# A page

```yaml title="my.yaml"
run: {seed: 1}
```

```
forage demo \\
  run.seed=1    # trains
# a comment alone

echo 'a # b'
```

`forage status` prints

```
trainer: waits for groups
```
"""


def test_blocks_and_lines_are_read_with_their_places(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    settings, commands, printed = read_blocks(page)
    assert (settings.title, settings.language, settings.line) == ("my.yaml", "yaml", 4)
    assert [(line.line, line.text, line.comment) for line in read_lines(commands)] == [
        (8, "forage demo   run.seed=1", "trains"),
        (12, "echo 'a # b'", ""),
    ]
    assert is_shell(commands)
    assert not is_shell(printed)
    assert not is_shell(settings)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kubectl get pods", "needs a cluster"),
        ("docker compose run --rm forage status", "needs Docker"),
        ("make up", "needs Docker"),
        ("make setup DEVICE=gpu", "needs a GPU"),
        ("forage index push wiki s3://bucket/wiki", "needs another machine"),
        ("forage data nq", "needs a network"),
        ("forage worker my_agent.py -c my.yaml", "works for a run beside it until Ctrl-C"),
        ("forage data nq --file train=train.jsonl", ""),
        ("query: up", "needs Prometheus, for a query"),
        ("forage up model.path=/nowhere/my-model", "needs /nowhere/my-model of the reader"),
        ("forage train -c my.yaml", "needs models/large, which is downloaded"),
        ("forage config check -c my.yaml", ""),
        ("forage compare-runs runs/mine runs/x", "needs runs/x of the reader"),
        ("forage check-history runs/mine", ""),
        ("forage eval compare runs/mine/a:x runs/mine", "needs runs/mine/a of the reader"),
        ("forage trajectories --wrong", "needs a run, and none was made yet"),
        (".venvs/cli/bin/forage demo", ""),
        (".venvs/cli/bin/python make_questions.py", ""),
        (".venvs/reward/bin/python -m forage_reward", "needs a checkout"),
        ("make demo", "needs a checkout"),
        ("echo '<think>t</think>' | forage reward explain -t Oslo", ""),
    ],
)
def test_what_cannot_be_run_has_a_reason(text: str, reason: str) -> None:
    missing = ["models/large"] if "my.yaml" in text else []
    assert find_reason(text, missing, lambda path: path == "runs/mine", is_wheel=True) == reason


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("forage up -c my.yaml", Kind.SERVES),
        ("forage up --train", Kind.STARTS),
        ("forage serve retriever", Kind.SERVES),
        ("python graph.py triples.jsonl &", Kind.SERVES),
        ("make demo", Kind.STARTS),
        ("forage eval data/world/test.parquet --policy runs/latest@latest", Kind.STARTS),
        ("forage eval compare a b", Kind.ALONE),
        ("forage rollout sample data/world/test.parquet", Kind.ASKS),
        ("forage rollout sample --help", Kind.ALONE),
        ("forage ask 'who?'", Kind.ASKS),
        ("curl localhost:18610/retrieve", Kind.ASKS),
        ("forage data world", Kind.ALONE),
    ],
)
def test_what_a_command_starts_is_known(text: str, kind: Kind) -> None:
    assert find_kind(text) is kind


def test_files_that_a_command_writes_are_known() -> None:
    assert list_outputs("forage reward score rows.parquet -o scored.jsonl") == ["scored.jsonl"]
    assert list_outputs("openssl rand -hex 32 > token.txt") == ["token.txt"]
    assert list_outputs("forage index eval wiki questions.jsonl --out report") == []


def test_most_of_what_pages_show_of_forage_can_be_run() -> None:
    lines = [
        line for page in list_pages() for block in read_blocks(page) if is_shell(block) for line in read_lines(block)
    ]
    lines += read_examples(COMMANDS_PAGE)
    own = [
        line.text for line in lines if "forage " in line.text and "docker" not in line.text and "helm" not in line.text
    ]
    runnable = [text for text in own if not find_reason(text, [], lambda path: True, is_wheel=False)]
    assert len(runnable) > 0.6 * len(own)
