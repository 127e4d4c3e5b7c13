"""Conventions of the families of sentence encoders: prefixes, pooling, normalization, maximum length.

Sources are the model cards: intfloat/e5-base-v2 (with Search-R1's limit of 256 tokens), BAAI/bge-base-en-v1.5,
sentence-transformers/all-MiniLM-L6-v2, thenlper/gte-base, facebook/contriever.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from forage_retriever import artifacts
from forage_runtime.errors import DataError, SettingsError

AUTO = "auto"


class Pooling(StrEnum):
    """How the last hidden states [tokens, dimension] of a text become one vector."""

    MEAN = "mean"
    CLS = "cls"


@dataclass(frozen=True)
class Convention:
    """How texts enter an encoder and vectors leave it.

    Attributes:
        query_prefix: put before every query.
        passage_prefix: put before every passage.
        normalize: whether vectors are scaled to unit length.
        max_tokens: length to which a text is truncated, prefix and special tokens included.
    """

    name: str
    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: Pooling = Pooling.MEAN
    normalize: bool = True
    max_tokens: int = 256

    def compute_digest(self, *parts: str) -> str:
        """SHA-256 of all fields except the name, and of other parts."""
        values = (getattr(self, field.name) for field in fields(self) if field.name != "name")
        return artifacts.compute_digest(*map(str, values), *parts)


PLAIN = Convention("plain", max_tokens=512)
CONVENTIONS = {
    convention.name: convention
    for convention in (
        PLAIN,
        Convention("minilm"),
        Convention("e5", query_prefix="query: ", passage_prefix="passage: "),
        Convention(
            "bge",
            query_prefix="Represent this sentence for searching relevant passages: ",
            pooling=Pooling.CLS,
            max_tokens=512,
        ),
        Convention("gte", max_tokens=512),
        Convention("contriever", normalize=False, max_tokens=512),
    )
}
_NAMES = (
    (r"(^|[-_/])all[-_]minilm[-_]", "minilm"),
    (r"(^|[-_/])e5[-_](small|base|large)", "e5"),
    (r"(^|[-_/])bge[-_](small|base|large)[-_]en", "bge"),
    (r"(^|[-_/])gte[-_](small|base|large)", "gte"),
    (r"(^|[-_/])contriever", "contriever"),
)
_POOLING_MODES = {"pooling_mode_mean_tokens": Pooling.MEAN, "pooling_mode_cls_token": Pooling.CLS}


def find_convention(name: str) -> Convention:
    """The convention of this name.

    Raises:
        SettingsError: it is unknown.
    """
    if name not in CONVENTIONS:
        known = ", ".join(sorted(CONVENTIONS))
        raise SettingsError(f"retriever.encoder.convention is {name!r}: give one of {AUTO}, {known}")
    return CONVENTIONS[name]


def infer_from_model(model: str) -> Convention:
    """The convention of a model by its name; `plain` where the name is of no known family."""
    matches = (name for pattern, name in _NAMES if re.search(pattern, model.lower()))
    return CONVENTIONS[next(matches, PLAIN.name)]


def infer_from_folder(folder: Path) -> Convention:
    """The convention of a model folder: prefixes by its name, the rest from its sentence-transformers files.

    Raises:
        DataError: those files ask for something unsupported, or cannot be read.
    """
    convention = infer_from_model(_read_model_name(folder))
    modules = _read_json(folder / "modules.json")
    if modules is None:
        return convention
    kinds = {str(module["type"]).rsplit(".", 1)[-1]: folder / str(module["path"]) for module in modules}
    if unknown := kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise DataError(
            f"encoder {folder} has the modules {', '.join(sorted(unknown))}, which are not supported: serve it with"
            " text-embeddings-inference and set retriever.encoder.model to its URL"
        )
    convention = replace(convention, normalize="Normalize" in kinds)
    if "Pooling" in kinds:
        convention = replace(convention, pooling=_read_pooling(kinds["Pooling"] / "config.json"))
    limit = (_read_json(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    if limit is not None:
        known = convention.name != PLAIN.name
        convention = replace(convention, max_tokens=min(limit, convention.max_tokens) if known else limit)
    return convention


def _read_model_name(folder: Path) -> str:
    """The folder's own name, or that of Hugging Face's cache around it (`models--owner--name/snapshots/revision`)."""
    cached = [part for part in folder.parts if part.startswith("models--")]
    return cached[-1].replace("--", "/") if cached else folder.resolve().name


def _read_pooling(file: Path) -> Pooling:
    config = _read_json(file) or {}
    if (mode := config.get("pooling_mode")) in list(Pooling):  # written by newer versions of sentence-transformers
        return Pooling(mode)
    modes = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in _POOLING_MODES:
        raise DataError(f"{file} asks for {' and '.join(modes) or mode or 'no pooling'}: mean and cls are supported")
    return _POOLING_MODES[modes[0]]


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}): copy the model's folder again") from None
