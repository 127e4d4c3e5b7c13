"""Questions from Parquet files in the Search-R1 layout."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from forage_proto.v1.trajectory_pb2 import ChatMessage, GroundTruth
from forage_runtime.errors import DataError, UserError
from forage_runtime.settings.rollout import DEFAULT_ENVIRONMENT
from forage_runtime.text.answers import normalize_answer

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")
_INT64 = range(-(2**63), 2**63)
_NAMED = 5
"""Accepted answers that a warning names."""


class RejectedPromptError(ValueError):
    """The chat template rejects a conversation, of this number among those that were given."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


class PromptTokenizer(Protocol):
    """The part of a tokenizer that the length filter uses."""

    def count_prompt_tokens(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[int]:
        """Count the tokens of each conversation under the chat template, with the generation prompt.

        Raises:
            RejectedPromptError: the template has no place for a conversation, such as one with a system message.
        """


@dataclass(frozen=True)
class Question:
    """One row of a file; `split` and `index` together are unique within a `data_source`."""

    data_source: str
    split: str
    index: int
    messages: tuple[ChatMessage, ...]
    ground_truth: GroundTruth
    text: str  # for reports: the question without instructions, if the file has it
    file: int = 0  # position of its file among those that were read

    @property
    def chat(self) -> list[dict[str, str]]:
        """Its messages as a chat template takes them."""
        return [{"role": message.role, "content": message.content} for message in self.messages]

    def uid(self, epoch: int | str) -> str:
        """The group's id in the `epoch`-th pass over the data (from 0), or for another purpose (text)."""
        return f"{self.data_source}/{self.split}/{self.index}/{epoch}"


class WordlessGold(NamedTuple):
    """An accepted answer of which normalisation leaves nothing, such as "A" or "?!": no answer matches it.

    where: its file and row; is_only: the question has no other answer.
    """

    where: str
    gold: str
    is_only: bool


@dataclass(frozen=True)
class Questions:
    """Questions of some files.

    digest: SHA-256 of the files; filtered: prompts that were too long, by data source; wordless: accepted answers that
    match nothing.
    """

    rows: tuple[Question, ...]
    digest: str
    filtered: Mapping[str, int] = field(default_factory=dict)
    wordless: tuple[WordlessGold, ...] = ()

    def describe_wordless(self) -> str:
        """Describe the accepted answers that match nothing, in a sentence; empty: there are none."""
        if not self.wordless:
            return ""
        named = ", ".join(f"{where}: {gold!r:.80}" for where, gold, _ in self.wordless[:_NAMED])
        more = f" and {len(self.wordless) - _NAMED} more" if len(self.wordless) > _NAMED else ""
        return (
            f"{len(self.wordless)} accepted answers match nothing, because exact match and F1 drop punctuation and the "
            f"words a, an and the ({named}{more}), and {sum(one.is_only for one in self.wordless)} of them are the "
            "only one of their question: give answers in other words, such as the text of an option for its letter"
        )

    def filter_by_length(self, tokenizer: PromptTokenizer, max_tokens: int, limit: int = -1) -> Questions:
        """Keep questions whose prompt has at most `max_tokens` tokens, and of these the first `limit`; -1: all.

        Raises:
            DataError: no prompt is short enough, or the model's chat template rejects one.
        """
        chats = [row.chat for row in self.rows]
        try:
            lengths = tokenizer.count_prompt_tokens(chats)
        except RejectedPromptError as error:
            row = self.rows[error.number]
            raise DataError(
                f"the model's chat template rejects the question '{row.uid('').removesuffix('/')}', whose messages are "
                f"of {', '.join(m.role for m in row.messages)} ({error}): change the messages of the question file, "
                "or set model.path to a model whose template takes them"
            ) from None
        fits = [0 < length <= max_tokens for length in lengths]
        kept = [row for row, fit in zip(self.rows, fits, strict=True) if fit]
        filtered = Counter(row.data_source for row, fit in zip(self.rows, fits, strict=True) if not fit)
        if not kept:
            raise DataError(
                f"none of {len(self.rows)} questions has a prompt of at most {max_tokens} tokens: "
                "raise rollout.max_start_length"
            )
        return Questions(tuple(kept if limit < 0 else kept[:limit]), self.digest, filtered, self.wordless)


def read_questions(files: Iterable[Path]) -> Questions:
    """Read the questions of all files, in order.

    Raises:
        DataError: the message names file, row, column and the expected value.
    """
    rows: list[Question] = []
    wordless: list[WordlessGold] = []
    digest = hashlib.sha256()
    first_places: dict[str, str] = {}
    for place, file in enumerate(files):
        for number, question in enumerate(_read_file(file)):
            here = f"{file} row {number}"
            uid = question.uid(0)
            if uid in first_places:
                raise DataError(
                    f"{here}: data_source, extra_info.split and extra_info.index repeat those of {first_places[uid]}: "
                    "together they must identify a question"
                )
            first_places[uid] = here
            golds = question.ground_truth.targets
            blank = [gold for gold in golds if not normalize_answer(gold)]
            wordless += [WordlessGold(here, gold, len(blank) == len(golds)) for gold in blank]
            rows.append(replace(question, file=place))
        digest.update(file.read_bytes())
    if not rows:
        raise DataError("there is no question file: give data.train_files and data.val_files one each")
    return Questions(tuple(rows), digest.hexdigest(), wordless=tuple(wordless))


def check_batch_size(questions: Sequence[Question], batch_size: int, weights: Sequence[float] = ()) -> None:
    """Check that the questions make a batch, and that each file that has a weight has a question.

    Args:
        weights: of each file (`Question.file`); empty: all questions are one pool.

    Raises:
        DataError: they do not.
    """
    if len(questions) < batch_size:
        raise DataError(
            f"data.train_files hold {len(questions)} usable questions, fewer than data.train_batch_size = "
            f"{batch_size}: add files or lower it"
        )
    used = {question.file for question in questions}
    empty = next((file for file in range(len(weights)) if file not in used), None)
    if empty is not None:
        raise DataError(f"data.train_files: file {empty + 1} has a weight and no usable question: leave it out")


def check_routes(data_sources: Iterable[str], routes: Collection[str], origin: str, where: str) -> None:
    """Check that each data source has a reward: without one every group of it ends without a score.

    Args:
        routes: data sources with a reward; origin, where: of the data sources and of the routes, for the message.

    Raises:
        UserError: one has none.
    """
    if unknown := sorted(set(data_sources) - set(routes)):
        raise UserError(
            f"data source '{unknown[0]}' of {origin} has no reward: add reward.routes.{unknown[0]}.name "
            f"({where} has routes for {', '.join(sorted(routes))})"
        )


def check_environments(data_sources: Iterable[str], wanted: Mapping[str, str], served: Mapping[str, str]) -> None:
    """Check that the rollout service gives each data source the environment that the settings want.

    Args:
        wanted, served: data source → environment, of those that are listed.

    Raises:
        UserError: one gets another environment.
    """
    for source in sorted(set(data_sources)):
        want, serve = (table.get(source, DEFAULT_ENVIRONMENT) for table in (wanted, served))
        if want != serve:
            raise UserError(
                f"data source '{source}' gets the environment '{serve}' from the rollout service, and these settings "
                f"want '{want}': start both with the same rollout.environments.{source}"
            )


def _read_file(file: Path) -> list[Question]:
    if not file.is_file():
        raise DataError(f"data file {file} does not exist: give a Parquet file, for instance of `forage data world`")
    try:
        parquet = pq.ParquetFile(file)
        missing = [name for name in COLUMNS if name not in parquet.schema_arrow.names]
        if missing:
            raise DataError(
                f"{file} lacks the column '{missing[0]}' (it has: {', '.join(parquet.schema_arrow.names)}): "
                f"the Search-R1 layout needs {', '.join(COLUMNS)}"
            )
        rows = parquet.read(columns=list(COLUMNS)).to_pylist()
        if not rows:
            raise DataError(f"{file} has no rows: give a file with questions, or leave it out")
    except (pa.ArrowException, OSError, ValueError) as error:  # of a name that is no text, too
        raise DataError(f"{file} cannot be read as Parquet ({' '.join(str(error).split())}): write it again") from None
    return [_question(row, f"{file} row {number}") for number, row in enumerate(rows)]


def _question(row: dict[str, Any], where: str) -> Question:
    source = _field(row, "data_source", str, where, "data_source")
    info = _field(row, "extra_info", dict, where, "extra_info")
    split = _field(info, "split", str, where, "extra_info.split")
    index = _field(info, "index", int, where, "extra_info.index")
    messages = _field(row, "prompt", list, where, "prompt")
    if not messages:
        raise DataError(f"{where}: column 'prompt' is empty: it must hold at least one {{role, content}}")
    chat = []
    for message in messages:
        if not isinstance(message, dict):
            raise DataError(f"{where}: column 'prompt' must hold {{role, content}} messages, not {message!r}")
        role = _field(message, "role", str, where, "prompt.role")
        chat.append(ChatMessage(role=role, content=_field(message, "content", str, where, "prompt.content")))
    reward_model = _field(row, "reward_model", dict, where, "reward_model")
    truth = reward_model.get("ground_truth")
    if isinstance(truth, str):  # as verl's own data sets have it
        truth = {"target": truth}
    truth = _ground_truth(_field({"": truth}, "", dict, where, "reward_model.ground_truth"), where)
    text = info.get("question")
    return Question(source, split, index, tuple(chat), truth, text if isinstance(text, str) else chat[-1].content)


def _ground_truth(truth: dict[str, Any], where: str) -> GroundTruth:
    column = "reward_model.ground_truth"
    target = truth.get("target")
    if isinstance(target, int) and not isinstance(target, bool):
        numbers = _field(truth, "numbers", list, where, f"{column}.numbers")
        if target not in _INT64 or not numbers or not all(_is_integer(n) for n in numbers):
            raise DataError(
                f"{where}: column '{column}' must hold a target and a list of numbers, all integers of 64 bits, "
                f"not {truth!r}"
            )
        return GroundTruth(countdown_target=target, countdown_numbers=numbers)
    if isinstance(target, str):
        target = [target]
    if not isinstance(target, list) or not target or not all(isinstance(t, str) for t in target):
        raise DataError(f"{where}: column '{column}.target' must be a list of strings or an integer, not {target!r}")
    return GroundTruth(targets=target)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in _INT64


def _field(row: dict[str, Any], name: str, kind: type, where: str, column: str) -> Any:
    value = row.get(name)
    if not (_is_integer(value) if kind is int else isinstance(value, kind)):
        words = {str: "text", int: "an integer of 64 bits", list: "a list", dict: "a struct"}
        raise DataError(f"{where}: column '{column}' must be {words[kind]}, not {value!r}")
    return value
