"""Folders of published policies as they lie side by side in a run: their order, what they need, whole ones of deltas.

A folder with a delta has a description of its policy, the announcement in JSON. Parts are looked for beside it, by the
names of their folders, so that a run can be copied elsewhere.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from google.protobuf import json_format

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.errors import DataError
from forage_runtime.files import durable
from forage_weights.announcement import PolicyError, list_parts, verify_files
from forage_weights.delta import DeltaError, patch_files
from forage_weights.tensors import SUFFIX

DESCRIPTION, SIGNED = "policy.json", "signed.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WHOLE = "whole-"
_NAME = re.compile(r"v(\d+)-e(\d+)", re.ASCII)


def parse_name(name: str) -> tuple[int, int] | None:
    """The epoch and the version in the name of a policy's folder; None: it is no such name.

    Policies are ordered by them: a trainer that went back to a checkpoint has a higher epoch and a lower version.
    """
    found = _NAME.fullmatch(name)
    return (int(found[2]), int(found[1])) if found else None


def list_published(run: Path) -> list[tuple[int, Path]]:
    """List version and folder of the policies that a run has kept: whole ones, deltas and adapters, the newest last.

    What `trainer.publish.uri` holds are copies of these folders.
    """
    folders = (run / "policies").glob("v*-e*")
    orders = sorted((order, folder) for folder in folders if (order := parse_name(folder.name)) is not None)
    return [(version, folder) for (_, version), folder in orders]


def find_newest(run: Path) -> Path | None:
    """The folder of the newest policy that a run has published, of whatever kind; None before the first one."""
    return next((folder for _, folder in reversed(list_published(run))), None)


def write_description(folder: Path, policy: Policy) -> None:
    """Describe a policy in its folder, if that needs others."""
    if policy.parts:
        (folder / DESCRIPTION).write_text(
            json_format.MessageToJson(policy, preserving_proto_field_name=True) + "\n", encoding="utf-8"
        )


def describe_folder(folder: Path) -> Policy | None:
    """Read the description of a policy in parts; None of a whole one.

    Raises:
        DataError: it is damaged.
    """
    try:
        return json_format.Parse((folder / DESCRIPTION).read_text(encoding="utf-8"), Policy())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, json_format.ParseError) as error:
        raise DataError(f"{folder / DESCRIPTION} cannot be read ({error}): take another version") from None


def list_needed(policy: Policy) -> set[str]:
    """List the names of the folders that hold a policy: its own, and those of its parts."""
    return {name_folder(uri) for uri in (policy.uri, *(part.uri for part in policy.parts))}


def name_folder(uri: str) -> str:
    """The name of the folder that an address ends in."""
    return uri.rstrip("/").rpartition("/")[2]


def _find_part(folder: Path, uri: str) -> Path:
    """The folder of a part, beside the one that lists it."""
    name = name_folder(uri)
    if not name or name.startswith(".") or not name.isprintable():
        raise DataError(f"{folder / DESCRIPTION} names the part {uri[:200]!r}: expected the name of a folder beside it")
    return folder.with_name(name)


def name_whole(folder: Path) -> Path:
    """The folder beside one with a delta that `open_whole` makes of it."""
    return folder.with_name(f"{_WHOLE}{folder.name}")


def strip_whole(folder: Path) -> Path:
    """The folder with a delta that one of `name_whole` belongs to; any other stays as it is."""
    return folder.with_name(folder.name.removeprefix(_WHOLE))


def open_whole(folder: Path) -> Path:
    """Find a folder that holds the whole policy: this one, or, if it holds a delta, one that is made beside it.

    Raises:
        DataError: it holds an adapter alone; or as `make_whole`.
        DiskFullError: as `make_whole`.
    """
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        is_published = parse_name(folder.name) is not None
        source = folder.parent.parent if is_published else "RUN"
        raise DataError(
            f"{folder} holds a LoRA adapter without its model, which only the engines of its run serve: write the "
            f"policy of a checkpoint whole with 'forage trainer export {source} FOLDER', and give that folder"
        )
    if describe_folder(folder) is None:
        return folder
    whole = name_whole(folder)
    if not whole.is_dir():
        make_whole(folder, whole)
    return whole


def make_whole(folder: Path, target: Path) -> None:
    """Write the whole policy of a folder that holds a delta; `target` is complete or absent.

    Raises:
        DataError: a part is missing or altered.
        DiskFullError: there is no room for it.
    """
    policy = describe_folder(folder)
    if policy is None:
        raise DataError(f"{folder} holds no delta: it has no {DESCRIPTION}")
    places = [(_find_part(folder, part.uri), part.files) for part in list_parts(policy)]
    partial = durable.name_partial(target)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for place, files in places:
            if not all((place / name).is_file() for name in files):
                raise DataError(
                    f"{folder} holds what has changed since {places[0][0].name}, and {place} is not there any more: "
                    "take another version, or export a checkpoint with 'forage trainer export'"
                )
            verify_files(policy, place, files)
        with durable.detect_full_disk(target):
            shutil.copytree(places[0][0], partial, ignore=shutil.ignore_patterns(SIGNED))
            weights = sorted(partial.glob(f"*{SUFFIX}"))
            for place, files in places[1:]:
                for name in files:
                    patch_files(place / name, weights)
            verify_files(policy, partial)
            durable.sync_tree(partial)
            partial.rename(target)
    except (PolicyError, DeltaError, OSError) as error:  # a trainer may delete a part meanwhile
        raise DataError(f"{folder} cannot be made whole: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
