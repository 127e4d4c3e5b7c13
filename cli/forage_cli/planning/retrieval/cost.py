"""CPU seconds of a query, from measured figures; what was not measured has no figure.

`retrieval_speeds.yaml` has searches among vectors, and the encoders of base models; `query_speeds.yaml` has the rest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from forage_cli.planning.retrieval.corpus import MINILM, Corpus
from forage_runtime.errors import UserError
from forage_runtime.settings import RetrievalMode, RetrieverSettings

VECTOR_SPEEDS = Path(__file__).parents[1] / "retrieval_speeds.yaml"
QUERY_SPEEDS = Path(__file__).with_name("query_speeds.yaml")
EXACT = "Flat"
LEAST_RECALL = 0.9
"""Of the exact three nearest, where a plan proposes another type."""

Load = Literal["batch", "single"]
"""Under load queries form batches of 64; alone each is searched by itself."""

_SHAPES = {(6, 384): MINILM, (12, 768): "base"}
"""Layers and width of a BERT → its name in the tables."""


class UnknownCostError(Exception):
    """A part of the cost was not measured; the message says which."""


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a query.

    Attributes:
        recall: share of the exact nearest three that are found, as measured at the highest effort up to the one that is
            set; None without vectors, or below every effort that was measured.
        measured: passages among which that recall was measured.
    """

    encoding: float
    search: float
    service: float
    recall: float | None
    measured: int

    @property
    def total(self) -> float:
        return self.encoding + self.search + self.service


@dataclass(frozen=True)
class _Type:
    """A measured type of index: its row in the table, and the cells of the factory string."""

    row: Mapping[str, Any]
    cells: int
    is_graph: bool

    def choose_effort(self, retriever: RetrieverSettings) -> int:
        return retriever.ef_search if self.is_graph else min(retriever.nprobe, self.cells) or 1


def estimate_cost(retriever: RetrieverSettings, corpus: Corpus, load: Load = "batch") -> Cost:
    """The cost of one query.

    Raises:
        UnknownCostError: of this type, encoder or number of passages nothing was measured.
    """
    if corpus.passages is None:
        raise UnknownCostError("not checked: the number of passages is not known (--passages)")
    if retriever.rerank.model:
        raise UnknownCostError("not measured: reranking (retriever.rerank)")
    encoding = search = 0.0
    recall = None
    if retriever.mode is not RetrievalMode.DENSE:
        search += _estimate_bm25(corpus.passages)
    if retriever.mode is not RetrievalMode.BM25:
        encoding, width = _estimate_encoding(retriever, load), read_width(retriever.encoder.model)
        vectors, recall = _estimate_vectors(retriever, corpus.passages, corpus.factory, width, load)
        search += vectors
    return Cost(encoding, search, float(_read(QUERY_SPEEDS)["service"]), recall, _read_measured())


def list_measured(passages: int) -> list[dict[str, object]]:
    """Settings of measured types that find `LEAST_RECALL` or more, with cells that suit so many passages.

    Those with the best recall first; each with the least effort that reaches its recall.
    """
    cells = 2 ** round(math.log2(16 * math.sqrt(passages)))
    found = []
    for name, row in _read(VECTOR_SPEEDS)["types"].items():
        factory = name.replace("IVF,", f"IVF{cells},")
        effort, recall = max(row["recall_3"].items(), key=lambda one: one[1])
        if recall >= LEAST_RECALL:
            changes: dict[str, object] = {"retriever.faiss_factory": factory}
            if "step" in row["batch"]:
                changes["retriever.ef_search"] = effort
            elif "code" in row["batch"]:
                changes["retriever.nprobe"] = effort
            found.append((recall, changes))
    return [changes for _, changes in sorted(found, key=lambda one: -one[0])]


def estimate_vector_bytes(factory: str, width: int) -> int | None:
    """Bytes of memory a vector of so many numbers; None: the type was not measured."""
    found = _find_type(factory)
    return None if found is None else round(found.row["bytes"] * width / _read_dimension())


def read_width(model: str) -> int:
    """Numbers of an encoder's vectors; those of the base models where its folder is not here."""
    return _read_shape(model)[1]


@cache
def _read(file: Path) -> Mapping[str, Any]:
    speeds: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return speeds


def _read_dimension() -> int:
    return int(_read(VECTOR_SPEEDS)["measured"]["dimension"])


def _read_measured() -> int:
    return int(_read(VECTOR_SPEEDS)["measured"]["passages"])


def _estimate_bm25(passages: int) -> float:
    measured = _read(QUERY_SPEEDS)["bm25"]
    if passages > measured["most"]:
        raise UnknownCostError(f"not measured: BM25 over more than {measured['most']:,} passages")
    return float(measured["seconds"]) * max(1.0, passages / float(measured["passages"]))


def _estimate_encoding(retriever: RetrieverSettings, load: Load) -> float:
    """Seconds of encoding; none where an endpoint does it."""
    encoder = retriever.encoder
    if encoder.url:
        return 0.0
    layers, width = _read_shape(encoder.model)
    precision = "int8" if encoder.precision == "auto" else str(encoder.precision)  # on CPUs
    measured = {**_read(VECTOR_SPEEDS)["encoders"], **_read(QUERY_SPEEDS)["encoders"]}
    try:
        return float(measured[_SHAPES[layers, width]][precision][load])
    except KeyError:
        raise UnknownCostError(
            f"not measured: an encoder of {layers} layers of width {width} in {precision} (retriever.encoder)"
        ) from None


def _read_shape(model: str) -> tuple[int, int]:
    """Layers and width of a BERT: of the bundled one, of a folder's config.json, or of the size that its name says.

    Raises:
        UserError: config.json has neither.
    """
    if model == MINILM:
        return 6, 384
    file = Path(model) / "config.json"
    if not file.is_file():
        name = Path(model).name
        return (12, 384) if "small" in name else (24, 1024) if "large" in name else (12, 768)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return int(config["num_hidden_layers"]), int(config["hidden_size"])
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(
            f"{file} has no num_hidden_layers and hidden_size: retriever.encoder.model must be an encoder's folder"
        ) from None


def _estimate_vectors(
    retriever: RetrieverSettings, passages: int, factory: str, width: int, load: Load
) -> tuple[float, float | None]:
    """Seconds of the search among vectors, and its recall."""
    found = _find_type(factory)
    if found is None:
        raise UnknownCostError(f"not measured: an index of type {factory}")
    law: Mapping[str, float] = found.row[load]
    effort = found.choose_effort(retriever)
    amounts = {"passage": passages, "cell": found.cells, "step": effort * math.log2(max(passages, 2))}
    if found.cells:
        amounts["code"] = passages * effort / found.cells
    grown = sum(seconds * amounts[name] for name, seconds in law.items() if name != "base")
    recalls = [share for at, share in sorted(found.row["recall_3"].items()) if at <= effort]
    return law.get("base", 0.0) + grown * width / _read_dimension(), recalls[-1] if recalls else None


def _find_type(factory: str) -> _Type | None:
    """The measured type of a factory string: rows name cells without their number."""
    name = factory.replace(" ", "")
    if name in ("IndexFlat", "IndexFlatIP"):  # an adopted file has the name of FAISS's class
        name = EXACT
    cells = re.match(r"IVF(\d+),", name)
    row = _read(VECTOR_SPEEDS)["types"].get(re.sub(r"^IVF\d+,", "IVF,", name))
    return None if row is None else _Type(row, int(cells[1]) if cells else 0, "step" in row["batch"])
