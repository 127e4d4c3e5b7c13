"""Public question answering sets, from the layout of FlashRAG's collection to Search-R1's.

A row of the collection (huggingface.co/datasets/RUC-NLPIR/FlashRAG_datasets) has `id`, `question`, `golden_answers` and
sometimes `metadata`, one file a split: `<set>/<split>.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq

from forage_cli.datasets.manifest import write_manifest
from forage_cli.datasets.question_file import NUMBER, TEXT, TEXTS, make_question_row, write_question_rows
from forage_runtime.errors import DataError
from forage_runtime.files import durable
from forage_runtime.text.search_prompt import format_search_prompt

COLLECTION = "RUC-NLPIR/FlashRAG_datasets"
SPLITS = {
    "nq": ("train", "dev", "test"),
    "hotpotqa": ("train", "dev"),
    "triviaqa": ("train", "dev", "test"),
    "popqa": ("test",),
    "2wikimultihopqa": ("train", "dev"),
    "musique": ("train", "dev"),
    "bamboogle": ("test",),
}
"""Data source → its splits in the collection."""

NO_QUESTION, NO_ANSWER = "no question", "no answer"
_ROWS = 10_000
_TIMEOUT_S = 30.0
_MAX_BYTES = 2**31
_CONTENT_HOSTS = (".hf.co", ".huggingface.co")
"""To which the hub redirects for the contents of large files."""

_INFO = {"split": TEXT, "index": NUMBER, "id": TEXT, "question": TEXT}


@dataclass(frozen=True)
class Summary:
    """Result of `convert_collection`: questions and dropped rows (by reason) per split; digests by file name."""

    questions: dict[str, int]
    dropped: dict[str, dict[str, int]]
    digests: dict[str, str]


def fetch_collection(source: str, cache: Path) -> dict[str, Path]:
    """Download every split of a data source from the Hugging Face Hub (or HF_ENDPOINT), unless it is in `cache`.

    Raises:
        DataError: a download failed.
    """
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    files = {}
    for split in SPLITS[source]:
        file = files[split] = cache / source / f"{split}.jsonl"
        if not file.exists():
            url = f"{hub}/datasets/{COLLECTION}/resolve/main/{source}/{split}.jsonl"
            _download(url, file, f"give the collection's files, as in --file {split}={split}.jsonl")
    return files


def _download(url: str, file: Path, remedy: str) -> None:
    """Download `url` to `file`; creates its folder.

    Args:
        remedy: advice that ends the error's sentence.

    Raises:
        DataError: downloads are forbidden, or the download failed.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):  # as in Hugging Face's tools
        raise DataError(f"{url} is not downloaded, because HF_HUB_OFFLINE is set: {remedy}")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            httpx.Client(follow_redirects=True, timeout=_TIMEOUT_S, event_hooks=_stay_at(url)) as client,
            client.stream("GET", url, headers={"accept-encoding": "identity"}) as reply,
            durable.stage_file(file) as partial,
            partial.open("wb") as out,
        ):
            reply.raise_for_status()
            for part in reply.iter_raw():
                out.write(part)
                if out.tell() > _MAX_BYTES:
                    raise DataError(f"{url} has more than {_MAX_BYTES} bytes, which no file of it has: {remedy}")
    except httpx.HTTPStatusError as error:
        raise DataError(f"{url} answers {error.response.status_code}: {remedy}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DataError(f"{url} cannot be reached ({' '.join(str(error).split())}): {remedy}") from None


def _stay_at(url: str) -> dict[str, list[Callable[[httpx.Request], None]]]:
    """Hooks that let redirects lead to the hub's own hosts only, and never from HTTPS to HTTP."""
    hub = httpx.URL(url)

    def check(request: httpx.Request) -> None:
        host = request.url.host
        is_own = host == hub.host or host.endswith((f".{hub.host}", *_CONTENT_HOSTS))
        if not is_own or (hub.scheme == "https" and request.url.scheme != "https"):
            raise httpx.UnsupportedProtocol(f"it leads to {request.url.scheme}://{host}, which is not the hub's")

    return {"request": [check]}


def convert_collection(source: str, files: Mapping[str, Path], out: Path) -> Summary:
    """Write `<split>.parquet` for each split and `manifest.json` to `out` (created if missing).

    A question mark is added where it is missing, as in Search-R1's data; a question's index is its row in the file.

    Args:
        files: split → JSONL or Parquet in the collection's layout.

    Raises:
        DataError: a file is missing, damaged or in another layout, or has no question with an answer.
    """
    out.mkdir(parents=True, exist_ok=True)
    questions, dropped = {}, {}
    for split, file in files.items():
        dropped_rows: Counter[str] = Counter()
        rows = _convert_records(source, split, file, dropped_rows)
        questions[split] = write_question_rows(out / f"{split}.parquet", rows, {"target": TEXTS}, _INFO)
        dropped[split] = dict(dropped_rows)
        if not questions[split]:
            (out / f"{split}.parquet").unlink()
            reason = ", ".join(f"{count} with {why}" for why, count in dropped_rows.items()) or "it is empty"
            raise DataError(f"{file} has no question with an answer ({reason}): it is not {source}'s {split}")
    origins = {split: hashlib.sha256(file.read_bytes()).hexdigest() for split, file in files.items()}
    facts = {"data_source": source, "questions": questions, "dropped": dropped, "sources": origins}
    digests = write_manifest(out, facts, [f"{split}.parquet" for split in files], ("pyarrow",))
    return Summary(questions, dropped, digests)


def _convert_records(source: str, split: str, file: Path, dropped_rows: Counter[str]) -> Iterator[dict[str, Any]]:
    for index, (where, record) in enumerate(_read_records(file)):
        question = _parse_question(record, where)
        answers = _parse_answers(record, where)
        if not question or not answers:
            dropped_rows[NO_ANSWER if question else NO_QUESTION] += 1
            continue
        own = record.get("id")
        info = {"split": split, "index": index, "id": None if own is None else str(own), "question": question}
        yield make_question_row(source, format_search_prompt(question), "fact-reasoning", {"target": answers}, info)


def _parse_question(record: Mapping[str, Any], where: str) -> str:
    text = record.get("question")
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{where}: 'question' is {text!r}: expected text")
    text = text.strip()
    return text if not text or text.endswith("?") else f"{text}?"


def _parse_answers(record: Mapping[str, Any], where: str) -> list[str]:
    found = record.get("golden_answers")
    if found is None:
        return []
    if isinstance(found, str):
        found = [found]
    if not isinstance(found, list) or not all(isinstance(answer, str) for answer in found):
        raise DataError(f"{where}: 'golden_answers' is {found!r}: expected a list of texts")
    return [answer for answer in found if answer.strip()]


def _read_records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over rows with their location for error messages."""
    try:
        yield from _read_parquet(file) if file.suffix == ".parquet" else _read_json_lines(file)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise DataError(f"{file} cannot be read ({reason}): give JSONL or Parquet in FlashRAG's layout") from None


def _read_json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where} is not JSON ({error}): the file is damaged, get it again") from None
            if not isinstance(record, dict):
                raise DataError(f"{where} is {line.strip()[:50]}: expected an object with question and golden_answers")
            _require_fields(where, record)
            yield where, record


def _read_parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with pq.ParquetFile(file) as parquet:
        names = parquet.schema_arrow.names
        _require_fields(str(file), names)
        number = 0
        columns = [name for name in ("id", "question", "golden_answers") if name in names]
        for batch in parquet.iter_batches(_ROWS, columns=columns):
            for record in batch.to_pylist():
                yield f"{file} row {number}", record
                number += 1


def _require_fields(where: str, names: Any) -> None:
    for name in ("question", "golden_answers"):
        if name not in names:
            raise DataError(
                f"{where} has no '{name}' (it has: {', '.join(names)}): "
                "FlashRAG's layout is id, question, golden_answers, metadata"
            )
