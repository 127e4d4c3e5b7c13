"""Model folders and published policies: what may be loaded, and which of two is newer. No engine here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from forage_common.errors import DataError, ForageError
from forage_common.v1.trajectory_pb2 import Policy

WEIGHTS = "model.safetensors"
_TIED_HEAD = "lm_head.weight"
_LARGEST_HEADER = 100 * 2**20
_REMEDY = "set model.path to a complete Hugging Face folder"


class PolicyError(ForageError):
    """A published policy cannot be served: missing, altered, or of another shape."""


def is_newer(candidate: Policy, serving: Policy | None) -> bool:
    """Whether the candidate replaces what is served: a later epoch always does, an earlier one never."""
    return serving is None or (candidate.epoch, candidate.version) > (serving.epoch, serving.version)


def same(one: Policy | None, other: Policy | None) -> bool:
    """Whether both are the same publication."""
    return one is not None and other is not None and (one.epoch, one.version) == (other.epoch, other.version)


def label(policy: Policy) -> str:
    """The policy as an engine's version string; `parse_label` reads it back."""
    return f"{policy.version}@{policy.epoch}"


def parse_label(text: str) -> tuple[int, int]:
    """(version, epoch) of a version string; of weights that nobody published, (0, 0)."""
    version, at, epoch = text.partition("@")
    return (int(version), int(epoch)) if at else (0, 0)


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape, from the header of a safetensors file, whose length is checked against it.

    Raises:
        ValueError: the file is missing, cut short, or not safetensors.
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
        shapes = {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    except (KeyError, TypeError, AttributeError, IndexError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"broken safetensors header ({error!r})") from None
    if size != 8 + length + end:
        raise ValueError(f"{size} bytes where the header promises {8 + length + end}")
    return shapes


def model_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape over all weight files of a model folder.

    Raises:
        ValueError: weights are missing or broken; the message names the file.
    """
    index = folder / f"{WEIGHTS}.index.json"
    names = [WEIGHTS]
    if not (folder / WEIGHTS).exists() and index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{index.name}: {error!r}") from None
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        try:
            shapes |= read_header(folder / name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return shapes


def check_model_folder(folder: Path) -> None:
    """Refuse what is not a servable model, before anything is started.

    Raises:
        DataError: one sentence that names the file.
    """
    if not folder.is_dir():
        raise DataError(f"model folder {folder} does not exist: {_REMEDY}")
    for name, key in (("config.json", "architectures"), ("tokenizer.json", "model"), ("tokenizer_config.json", "")):
        try:
            content = json.loads((folder / name).read_text())
        except OSError as error:
            raise DataError(f"model folder {folder} has no readable {name} ({error.strerror}): {_REMEDY}") from None
        except ValueError as error:
            raise DataError(f"{folder / name} is not JSON ({error}): {_REMEDY}") from None
        if not isinstance(content, dict) or (key and key not in content):
            raise DataError(f"{folder / name} has no '{key}': {_REMEDY}")
    if "chat_template" not in content and not (folder / "chat_template.jinja").exists():
        raise DataError(f"model folder {folder} has no chat template: {_REMEDY}, of a model with chat")
    try:
        model_shapes(folder)
    except ValueError as error:
        raise DataError(f"model folder {folder} has no usable weights ({error}): {_REMEDY}") from None


def verify(policy: Policy, expected: dict[str, tuple[int, ...]]) -> Path:
    """The weights file of a published policy, after its digest and shapes were checked.

    Args:
        expected: `model_shapes` of the model that the engine was started with.

    Raises:
        PolicyError: the file is missing, is not what was announced, or does not fit the engine.
    """
    file = Path(policy.uri) / WEIGHTS
    name = f"policy version {policy.version} of epoch {policy.epoch} at {file}"
    try:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise PolicyError(f"{name} cannot be read ({error.strerror}): is the run's folder shared?") from None
    if digest != policy.digest:
        raise PolicyError(f"{name} has digest {digest[:12]}…, announced was {policy.digest[:12]}…: it is not served")
    try:
        found = read_header(file)
    except ValueError as error:
        raise PolicyError(f"{name}: {error}") from None
    for shapes in (found, expected := dict(expected)):
        shapes.pop(_TIED_HEAD, None)
    if found != expected:
        odd = sorted(k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k))
        raise PolicyError(f"{name} does not fit the model that is served: {odd[0]} and {len(odd) - 1} more differ")
    return file
