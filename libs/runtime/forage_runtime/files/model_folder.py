"""Checks of a Hugging Face model folder without any ML library: configuration, tokenizer, chat template, weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forage_runtime.errors import DataError

WEIGHTS = "model.safetensors"
_LARGEST_HEADER = 100 * 2**20
_REMEDY = "set model.path to a complete Hugging Face folder"
_SCALED_ROPES = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})
"""Rotary embeddings whose models state the length that they reach by scaling."""
_PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of safetensors that hold weights as they are; a quantized folder has others, or scales beside its weights."""


def read_safetensors_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read tensor name → (type, shape) from the header of a safetensors file, and check the file's size against it.

    Raises:
        ValueError: the file is missing, truncated, or not safetensors.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size, _LARGEST_HEADER):
                raise ValueError("no safetensors header")
            tensors = json.loads(stream.read(length))
        tensors.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        described = {name: (str(tensor["dtype"]), tuple(tensor["shape"])) for name, tensor in tensors.items()}
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    except (KeyError, TypeError, AttributeError, IndexError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"damaged safetensors header ({error!r})") from None
    if size != 8 + length + end:
        raise ValueError(f"{size} bytes, but the header describes {8 + length + end}")
    return described


def read_end_of_turn(folder: Path) -> str:
    """Read the tokenizer's end-of-sequence text; empty if the folder has none."""
    try:
        token = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}/tokenizer_config.json cannot be read ({error}): {_REMEDY}") from None
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def read_chat_template(folder: Path) -> str:
    """Read the text of a folder's chat template, or of several one after the other; empty if it has none."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}/chat_template.jinja cannot be read ({error}): {_REMEDY}") from None
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template", "")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}/tokenizer_config.json cannot be read ({error}): {_REMEDY}") from None
    return found if isinstance(found, str) else json.dumps(found)


def list_weight_files(folder: Path) -> list[str]:
    """List the names of a model folder's weight files: one, or the shards of its index.

    Raises:
        ValueError: the index is damaged.
    """
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).exists() or not index.exists():
        return [WEIGHTS]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index.name}: {error!r}") from None


def read_model_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read tensor name → shape from all weight files of a model folder.

    Raises:
        ValueError: weights are missing or damaged; the message names the file.
    """
    return {name: shape for name, (_, shape) in _read_headers(folder).items()}


def _read_headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    headers: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in list_weight_files(folder):
        try:
            headers |= read_safetensors_header(folder / name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return headers


def read_context(folder: Path) -> int | None:
    """Read the most tokens that a model has positions for; None where its configuration does not say.

    As vLLM derives it, for the configurations that say it in one place.

    Raises:
        DataError: the configuration cannot be read.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}/config.json cannot be read ({error}): {_REMEDY}") from None
    text = config.get("text_config") or config
    found = [text[key] for key in ("max_position_embeddings", "n_positions") if isinstance(text.get(key), int)]
    if not found or any("model_max_length" in part for part in (config, text)):
        return None
    ropes = text.get("rope_parameters") or text.get("rope_scaling") or {}
    ropes = (
        [ropes]
        if "rope_type" in ropes or "type" in ropes
        else [rope for rope in ropes.values() if isinstance(rope, dict)]
    )
    factors = [
        rope.get("factor") or 1.0 for rope in ropes if rope.get("rope_type", rope.get("type")) not in _SCALED_ROPES
    ]
    return int(min(found) * max([1.0, *factors]))


def check_model_folder(folder: Path, weights: bool = True) -> None:
    """Reject a folder that the engine or the trainer cannot load, before anything is started.

    Args:
        weights: whether weights are required.

    Raises:
        DataError: one sentence that names the file.
    """
    if not folder.is_dir():
        raise DataError(f"model.path {folder} does not exist: {_REMEDY}")
    config: dict[str, Any] = {}
    for name, key in (("config.json", "architectures"), ("tokenizer.json", "model"), ("tokenizer_config.json", "")):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"model.path {folder} has no readable {name} ({error.strerror}): {_REMEDY}") from None
        except ValueError as error:
            raise DataError(f"{folder / name} is not JSON ({error}): {_REMEDY}") from None
        if not isinstance(content, dict) or (key and key not in content):
            raise DataError(f"{folder / name} has no '{key}': {_REMEDY}")
        config = config or content
    if "chat_template" not in content and not (folder / "chat_template.jinja").exists():
        raise DataError(f"model.path {folder} has no chat template: {_REMEDY}, of a model with chat")
    if not weights:
        return
    try:
        types = {name: kind for name, (kind, _) in _read_headers(folder).items()}
    except ValueError as error:
        raise DataError(f"model.path {folder} has no usable weights ({error}): {_REMEDY}") from None
    _check_quantization(folder, config.get("quantization_config"), types)


def _check_quantization(folder: Path, configured: object, types: Mapping[str, str]) -> None:
    """Reject a configuration that says its weights are quantized beside weights that are not: engines refuse it.

    Args:
        configured: the configuration's `quantization_config`.
        types: tensor name → type.

    Raises:
        DataError: they contradict each other.
    """
    if not isinstance(configured, dict) or configured.get("quantization_mode") == "online":  # BitNet's plain weights
        return
    method = str(configured.get("quant_method", ""))
    is_plain = all(kind in _PLAIN_TYPES and "scale" not in name for name, kind in types.items())
    if method != "gguf" and not is_plain:
        return
    found = " and ".join(sorted(set(types.values()))) or "none"
    raise DataError(
        f"{folder}/config.json says quantization_config {method or configured!r}, but the tensors beside it are "
        f"{found}, which this method does not write: delete quantization_config there, or {_REMEDY}"
    )
