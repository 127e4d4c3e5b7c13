"""`forage data coverage --search` with a real retriever over the corpus that it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service_process import StartService
from typer.testing import CliRunner

from forage_cli.datasets.question_file import NUMBER, TEXT, TEXTS, make_question_row, write_question_rows
from forage_cli.main import app

PLACES = {"Norway": "Oslo", "Mongolia": "Ulaanbaatar", "Peru": "Lima", "Kenya": "Nairobi"}


def test_the_share_of_the_top_k_is_that_of_the_retrievers_passages(
    start_service: StartService,
    wait_until_ready: Callable[..., None],
    free_address: Callable[[], str],
    tmp_path: Path,
) -> None:
    corpus, questions = tmp_path / "corpus.jsonl", tmp_path / "questions.parquet"
    texts = [f'"{country}"\nThe capital of {country} is {city}.' for country, city in PLACES.items()]
    lines = [json.dumps({"id": str(number), "contents": text}) for number, text in enumerate(texts)]
    corpus.write_text("\n".join(lines), encoding="utf-8")
    asked: list[tuple[str, str]] = [(f"capital of {country}", city) for country, city in PLACES.items()]
    # The words of the next lead to another passage than the one with the answer; of the last nothing is known.
    asked += [("Peru", "Nairobi"), ("capital of Chile", "Santiago")]
    rows: list[dict[str, Any]] = []
    for number, (text, city) in enumerate(asked):
        about = {"split": "test", "index": number, "question": text}
        rows.append(make_question_row("capitals", text, "qa", {"target": [city]}, about))
    write_question_rows(questions, rows, {"target": TEXTS}, {"split": TEXT, "index": NUMBER, "question": TEXT})
    address = free_address()
    settings = [
        f"data.corpus={corpus}",
        "retriever.mode=bm25",
        f"retriever.cache_dir={tmp_path / 'cache'}",
        f"retriever.http_address={address}",
        f"retriever.grpc_address={free_address()}",
    ]
    wait_until_ready(start_service("retriever", *settings), address)

    def count(topk: int) -> tuple[int, int]:
        file = tmp_path / f"{topk}.json"
        options = ["--search", "-q", str(questions), "--topk", str(topk), "--json", str(file)]
        done = CliRunner().invoke(app, ["data", "coverage", *options, *settings])
        assert done.exit_code == 0, done.output
        total = json.loads(file.read_text(encoding="utf-8"))["all"]
        return total["in_corpus"], total["in_topk"]

    assert count(1) == (5, 4)
    assert count(len(PLACES)) == (5, 4), "BM25 finds no passage without a word of the question"
