"""The command `forage probe`: it goes on after a kill, samples once, and refuses invalid requests."""

from __future__ import annotations

import re
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from completions_server import CompletionsServer
from evaluation_services import write_questions
from probe_parts import (
    build_trajectory,
)

from forage_cli.commands.probe import probe
from forage_records.trajectory_file import read_trajectories
from forage_runtime.errors import UserError


def test_fresh_trajectories_are_sampled_once(
    overrides: list[str],
    scripted: CompletionsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_questions(tmp_path / "questions.parquet", "world_facts")
    scripted.trajectory = lambda prompt: build_trajectory(0, id=f"{prompt.run_id}/{prompt.group_uid}/0")
    again = partial(probe, overrides, questions=file, points=2, samples=2, out=Path("found"))
    again(limit=2)
    assert len(scripted.prompts) == 2
    again()  # the other three
    assert sorted(prompt.group_uid for prompt in scripted.prompts) == [f"world_facts/test/{n}/0" for n in range(5)]
    assert {prompt.samples for prompt in scripted.prompts} == {1}
    assert len({prompt.sampling.seed for prompt in scripted.prompts}) == 5
    assert len(scripted.asked) == 5 * 3
    assert "5 probes in found" in capsys.readouterr().out
    assert [one.id for one in read_trajectories(tmp_path / "found" / "trajectories.parquet")] == [
        f"probe/world_facts/test/{number}/0/0" for number in range(5)
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name one file of trajectories"),
        (["a.parquet", "--questions", "b.parquet"], "name one file of trajectories"),
        (["missing.parquet"], "missing.parquet cannot be read"),
        (["bad.parquet"], "bad.parquet cannot be read as Parquet"),
        (["bad.parquet", "rollout.pots=1"], "rollout.pots"),
    ],
)
def test_invalid_requests_end_with_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.parquet").write_text("PAR?")
    options = iter(arguments)
    words = [word for word in options if word != "--questions" or not next(options)]
    questions = Path(arguments[2]) if "--questions" in arguments else None
    with pytest.raises(UserError, match=re.escape(sentence)):
        probe(words, questions=questions, config=None)
    assert list(islice(tmp_path.glob("*-probe"), 1)) == []
