"""`forage data coverage`: which answers a corpus holds, against a search of every answer in every passage."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from forage_cli.datasets import coverage
from forage_cli.datasets.coverage import ALL, find_answers, find_uncovered, holds_answer, list_answers, summarize
from forage_cli.datasets.question_file import NUMBER, TEXT, TEXTS, make_question_row, write_question_rows
from forage_cli.main import app
from forage_proto.v1.trajectory_pb2 import GroundTruth
from forage_records.questions import Question
from forage_runtime.errors import DataError
from forage_runtime.settings import load_settings

WORDS = st.sampled_from(["the", "New", "York", "york.", "Los", "a", "an", "B.", "12", "U.S.", "é", "yes", "no", "Mr"])
TEXTS_OF_WORDS = st.lists(WORDS, min_size=1, max_size=6).map(" ".join)
TOWNS = 40


def ask(*targets: str, source: str = "nq", text: str = "who?") -> Question:
    return Question(source, "train", 0, (), GroundTruth(targets=list(targets)), text)


def normalize(text: str) -> list[str]:
    """SQuAD's, from its description."""
    kept = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def is_in(answer: str, passage: str) -> bool:
    words, text = normalize(answer), normalize(passage)
    return any(text[begin : begin + len(words)] == words for begin in range(len(text)))


@given(answers=st.lists(TEXTS_OF_WORDS, max_size=8), passages=st.lists(TEXTS_OF_WORDS, max_size=8))
def test_it_finds_what_a_search_of_every_answer_in_every_passage_finds(answers: list[str], passages: list[str]) -> None:
    questions = [ask(answer) for answer in answers]
    found = find_answers(questions, passages)
    for question, answer in zip(questions, answers, strict=True):
        kept = list_answers(question)
        assert kept == [a for a in [" ".join(normalize(answer))] if len(a) > 1 and a not in ("yes", "no")]
        expected = bool(kept) and any(is_in(answer, passage) for passage in passages)
        assert any(one in found for one in kept) == expected
        assert holds_answer(question, passages) == expected


def test_the_pass_ends_once_every_answer_is_found() -> None:
    read: list[int] = []
    passages = (read.append(number) or "Paris is here" for number in range(100_000))
    assert find_answers([ask("Paris")], passages) == {"paris"}
    assert len(read) < 2000


def test_shares_are_of_the_questions_whose_answer_can_be_looked_for() -> None:
    questions = [ask("Paris"), ask("Rome", "Roma"), ask("Oslo", text="where?"), ask("yes"), ask("Bern", source="tq")]
    parts = summarize(questions, {"paris", "roma"}, [True, False, False, False, True])
    own = parts["nq"]
    assert (own.questions, own.not_sought, own.in_corpus, own.in_topk) == (4, 1, 2, 1)
    assert own.missing == ["where? (Oslo)"]
    assert parts[ALL].share == 2 / 4
    assert list(parts) == ["nq", "tq", ALL]
    assert summarize([], set())[ALL].share is None


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    """A corpus, and questions of which a quarter has no answer there: the settings."""
    names = [f"{'xyzw'[number % 4]}ander{number:02}" for number in range(TOWNS)]
    rows = [{"id": str(n), "contents": f'"Town {n}"\nIts mayor is {name}.'} for n, name in enumerate(names[:30])]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "corpus.jsonl").write_text(lines, encoding="utf-8")
    truth, info = {"target": TEXTS}, {"split": TEXT, "index": NUMBER, "question": TEXT}
    made = []
    for number, name in enumerate(names):
        about = {"split": "train", "index": number, "question": f"Who is mayor of town {number}?"}
        made.append(make_question_row("towns", f"Who?{number}", "qa", {"target": [name.title()]}, about))
    write_question_rows(tmp_path / "train.parquet", made, truth, info)
    return [f"data.corpus={tmp_path}/corpus.jsonl", f"data.train_files=[{tmp_path}/train.parquet]", "data.val_files=[]"]


def test_the_command_prints_shares_and_examples_and_writes_counts(task: list[str], tmp_path: Path) -> None:
    figures = tmp_path / "coverage.json"
    done = CliRunner().invoke(app, ["data", "coverage", *task, "--json", str(figures), "--examples", "1"])
    assert done.exit_code == 0, done.output
    assert "30 (75.0%)" in done.output
    assert "not in the corpus: Who is mayor of town 30?" in done.output
    assert "Who is mayor of town 31?" not in done.output
    assert json.loads(figures.read_text(encoding="utf-8"))["towns"]["in_corpus_share"] == 0.75


def test_a_check_warns_where_few_questions_have_an_answer(
    task: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(*settings: str) -> list[str]:
        return find_uncovered(load_settings(None, [*task, *settings], environ={}))

    assert warn() == []
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(corpus.read_text().splitlines(keepends=True)[:10]))
    (sentence,) = warn()
    assert sentence.startswith("the corpus has an accepted answer for 10 of 40 questions of towns, and")
    assert warn("rollout.environments={towns: {name: single_turn}}") == []
    assert warn("rollout.max_turns=0") == []
    monkeypatch.setattr(coverage, "_SAMPLED", 20)
    assert "for 5 of 20 questions of towns" in warn()[0]
    monkeypatch.setattr(coverage, "_MOST_PASSAGES", 9)
    assert warn() == [], "the answers may be in what is not read"


def test_without_questions_there_is_one_sentence(task: list[str]) -> None:
    done = CliRunner().invoke(app, ["data", "coverage", *task, "data.train_files=[]"])
    assert isinstance(done.exception, DataError)
    assert str(done.exception).startswith("there is no file of questions: name one by data.train_files")


def test_questions_that_are_trained_and_validated_on_count_once(task: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["data", "coverage", *task, f"data.val_files=[{tmp_path}/train.parquet]"])
    assert done.exit_code == 0, done.output
    assert "30 (75.0%)" in done.output
