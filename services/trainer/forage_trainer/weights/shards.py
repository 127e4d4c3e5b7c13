"""Tensors of several processes as safetensors that any number of processes can load.

A folder has a file of each process with the chunks that it holds. A file's header says which chunks, as
torch.distributed.checkpoint (DCP) does in its safetensors format; DCP's reader then assembles what a process asks for.
Nothing is pickled, neither in files, as DCP's own format would, nor between processes: none needs to ask another one.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from forage_runtime.errors import DataError
from forage_weights.trainer.model_files import write_unsynced

ANOTHER = "it is of another model.path or trainer.lora: set them as they were, or give another run.id"
"""Why a folder lacks tensors of a model, or has other ones."""
_PLACES, _VERSION = {"DCP_SHARDING_INFO": "saved_offsets"}, {"DCP_VERSION": "1.0"}


def write_part(folder: Path, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
    """Write this process's chunks of `tensors`: a chunk that several processes hold is written by one of them.

    Raises:
        OSError: the disk is full or fails.
    """
    chunks: dict[str, torch.Tensor] = {}
    places: dict[str, dict[str, list[int]]] = {}
    ((places_key, offsets_key),) = _PLACES.items()
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            is_here, (chunk,) = _is_written_here(name, tensor), tensor.__create_chunk_list__()
            local, offsets = tensor.to_local(), list(chunk.offsets)
        else:
            is_here, local, offsets = rank == 0, tensor, [0] * tensor.ndim
        if is_here and local.numel():
            chunks[name], places[name] = local, {offsets_key: offsets}
    folder.mkdir(parents=True, exist_ok=True)
    write_unsynced(folder / f"part_rank_{rank}.safetensors", chunks, {places_key: json.dumps(places), **_VERSION})


def load_parts(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill `tensors` (with DTensors: this process's part of them) from a folder that any number of processes wrote.

    Raises:
        DataError: the folder holds other tensors.
    """
    found = describe_parts(folder)
    if names := sorted(found.keys() ^ tensors.keys()):
        lacking = "lacks" if names[0] in tensors else "has"
        raise DataError(f"{folder} {lacking} {names[0]} ({len(names)} tensors differ): {ANOTHER}")
    for name, tensor in tensors.items():
        if found[name].size != tensor.shape:
            shapes = f"{list(found[name].size)} in {folder}, and {list(tensor.shape)} here"
            raise DataError(f"{name} is of shape {shapes}: {ANOTHER}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no process asks another one
        dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder, each of them whole, onto the CPU.

    Raises:
        DataError: the folder is not complete.
    """
    tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in describe_parts(folder).items()}
    load_parts(folder, tensors)
    return tensors


def describe_parts(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return shape, dtype and chunks of every tensor of a folder, by name.

    Raises:
        DataError: a file is not readable, or chunks of a tensor are missing.
    """
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"{folder} cannot be read ({error!r}): take another checkpoint") from None
    tensors = {name: one for name, one in found.items() if isinstance(one, TensorStorageMetadata)}
    for name, one in tensors.items():
        if sum(math.prod(chunk.sizes) for chunk in one.chunks) != math.prod(one.size):
            raise DataError(f"{folder} does not hold all of {name}: a file of some process is missing")
    return tensors


def _is_written_here(name: str, tensor: DTensor) -> bool:
    """Whether this process writes its chunk. The processes with the same chunk share the tensors among them."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    replica, replicas = 0, 1
    for place, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            replica, replicas = replica * size + place, replicas * size
    return replica == crc32(name.encode()) % replicas
