"""Which questions have an accepted answer in the corpus, and in the passages that a search finds for them.

An answer is found where its words stand together in a passage, both normalised as rewards do (case, punctuation,
articles). Rewards of substrings would also find it inside longer words.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from forage_records.questions import Question, read_questions
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.files.corpus import read_rows
from forage_runtime.security.token_file import open_token_file
from forage_runtime.settings import Settings
from forage_runtime.settings.rollout import DEFAULT_ENVIRONMENT
from forage_runtime.text.answers import normalize_answer

ALL = "all"
_TRIVIAL = frozenset({"yes", "no", "true", "false"})
_BATCH = 64
_EVERY = 1024
"""Passages between two looks whether every answer has been found."""
_SAMPLED, _MOST_PASSAGES = 500, 50_000
"""Questions of a data source, and passages, that `find_uncovered` reads in a few seconds."""
_FEW = 0.5


@dataclass
class Coverage:
    """Counts of the questions of one source, or of all.

    Attributes:
        not_sought: questions whose accepted answers are yes, no or a single sign, or that have none: they are not
            looked for, nor counted below.
        in_corpus: questions with an answer in the corpus.
        in_topk: questions with an answer in the passages that a search finds; None: nobody searched.
        missing: the first questions without an answer in the corpus, with their answers.
    """

    questions: int = 0
    not_sought: int = 0
    in_corpus: int = 0
    in_topk: int | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def sought(self) -> int:
        return self.questions - self.not_sought

    @property
    def share(self) -> float | None:
        """Share of the questions that are looked for with an answer in the corpus; None: there are none."""
        return self.in_corpus / self.sought if self.sought else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sought": self.sought, "in_corpus_share": self.share}


def list_answers(question: Question) -> list[str]:
    """The accepted answers of a question, normalised; none where only yes, no or a single sign is left of them."""
    answers = [normalize_answer(target) for target in question.ground_truth.targets]
    return [answer for answer in answers if len(answer) > 1 and answer not in _TRIVIAL]


def find_answers(
    questions: Iterable[Question], passages: Iterable[str], advance: Callable[[], object] = lambda: None
) -> set[str]:
    """Find the answers of any question that the passages hold, in one pass, which ends once it has them all.

    Args:
        advance: called after each passage.
    """
    wanted: dict[str, set[str]] = defaultdict(set)
    for answer in (answer for question in questions for answer in list_answers(question)):
        wanted[max(answer.split(), key=len)].add(answer)  # the longest word is in fewer passages than most others
    found: set[str] = set()
    for number, passage in enumerate(passages, 1):
        text = normalize_answer(passage)
        words = wanted.keys() & text.split()
        for word in words:
            held = {answer for answer in wanted[word] if _holds(text, answer)}
            found |= held
            wanted[word] -= held
            if not wanted[word]:
                del wanted[word]
        advance()
        if number % _EVERY == 0 and not wanted:
            break
    return found


def holds_answer(question: Question, passages: Iterable[str]) -> bool:
    """Whether one of the passages holds an accepted answer."""
    answers, texts = list_answers(question), map(normalize_answer, passages)
    return any(_holds(text, answer) for text in texts for answer in answers)


def _holds(text: str, answer: str) -> bool:
    """Whether the words of an answer stand together in a text; both normalised."""
    return f" {answer} " in f" {text} "


def summarize(
    questions: Sequence[Question], found: set[str], hits: Sequence[bool] | None = None, examples: int = 3
) -> dict[str, Coverage]:
    """Count by source, and over all under `ALL`.

    Args:
        found: answers that the corpus holds.
        hits: for each question, whether the retriever's passages hold an answer; None: it was not asked.
        examples: length of `Coverage.missing`.
    """
    parts = {ALL: Coverage(in_topk=None if hits is None else 0)}
    for number, question in enumerate(questions):
        answers = list_answers(question)
        for name in {question.data_source, ALL}:
            part = parts.setdefault(name, Coverage(in_topk=None if hits is None else 0))
            part.questions += 1
            if not answers:
                part.not_sought += 1
                continue
            if any(answer in found for answer in answers):
                part.in_corpus += 1
            elif len(part.missing) < examples:
                part.missing.append(f"{question.text} ({' | '.join(question.ground_truth.targets)})")
            if hits is not None and part.in_topk is not None:
                part.in_topk += hits[number]
    return {name: parts[name] for name in sorted(parts, key=lambda name: (name == ALL, name))}


def find_uncovered(settings: Settings) -> list[str]:
    """Find the data sources that are to be searched and of which few questions have an answer in the corpus.

    Judges a sample of the questions, and no corpus of more passages than `_MOST_PASSAGES`.

    Returns:
        A sentence for each.

    Raises:
        DataError: questions or corpus cannot be read.
    """
    if settings.retriever.index is not None or settings.retriever.shards or not settings.rollout.max_turns:
        return []
    searched: dict[str, list[Question]] = defaultdict(list)
    for question in read_questions(list_question_files(settings)).rows:
        route = settings.rollout.environments.get(question.data_source)
        if route is None or route.name == DEFAULT_ENVIRONMENT:
            searched[question.data_source].append(question)
    sample = [question for rows in searched.values() for question in rows[:: -(-len(rows) // _SAMPLED)]]
    with closing(read_rows(settings.data.corpus)) as rows:
        passages = (str(fields["contents"]) for _, fields, _ in rows)
        parts = summarize(sample, find_answers(sample, itertools.islice(passages, _MOST_PASSAGES)))
        if next(rows, None) is not None:  # the answers may be in what was not read
            return []
    return [
        f"the corpus has an accepted answer for {part.in_corpus:,} of {part.sought:,} questions of {name}, and no "
        "policy learns the others from what it reads: 'forage data coverage' shows some"
        for name, part in parts.items()
        if name != ALL and part.in_corpus < _FEW * part.sought
    ]


def list_question_files(settings: Settings) -> list[Path]:
    """List the files of questions of a recipe, each once."""
    return list(dict.fromkeys([*settings.data.train_paths, *settings.data.val_files]))


async def ask_retriever(
    settings: Settings, questions: Sequence[Question], topk: int, advance: Callable[[], object]
) -> list[bool]:
    """For each question, whether the first `topk` passages that the retriever finds hold an answer.

    Args:
        advance: called after each question.

    Raises:
        UnavailableError: the retriever does not answer.
        RefusedError: it rejects the search.
    """
    own = settings.retriever
    tokens = open_token_file(own.auth_token_file, "retriever.auth_token_file")
    hits: list[bool] = []
    async with RetrieverClient(own.http_address, tls=settings.tls, tokens=tokens) as retriever:
        for begin in range(0, len(questions), _BATCH):
            batch = questions[begin : begin + _BATCH]
            result = await retriever.search([question.text for question in batch], topk)
            for question, documents in zip(batch, result.documents, strict=True):
                hits.append(holds_answer(question, (document.contents for document in documents)))
                advance()
    return hits


def build_table(parts: dict[str, Coverage], topk: int) -> Table:
    """A row for each source, and one for all where there are several."""
    table = Table("source")
    searched = [f"in the top {topk}"] if parts[ALL].in_topk is not None else []
    for title in ("questions", "yes/no or none", "in the corpus", *searched):
        table.add_column(title, justify="right")
    for name, part in parts.items():
        if name == ALL and len(parts) == 2:
            continue
        counts = (part.in_corpus, part.in_topk or 0)[: 1 + len(searched)]
        shares = [f"{count:,} ({count / part.sought:.1%})" if part.sought else "–" for count in counts]
        table.add_row(name, f"{part.questions:,}", f"{part.not_sought:,}", *shares)
    return table
