"""Files with trajectories in a run's folder, at a local path or an fsspec address."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from upath import UPath

from forage_console.context import is_text
from forage_runtime.clients.calls import RefusedError

_STEP_FILE = re.compile(r"step-(\d{6,})\.parquet")
_STEP_PLACE = re.compile(r"step-(\d+)")
_ROW_BITS = 23


@dataclass(frozen=True)
class DataFile:
    """A file of trajectories.

    Attributes:
        place: step-<n>, or a validation as `name_place` names it.
        step: None for a validation.
        version: another one after any change of the file.
    """

    place: str
    step: int | None
    path: UPath
    version: str

    @property
    def key(self) -> int:
        """A number that no other file, nor another version of this one, has."""
        return int.from_bytes(blake2b(f"{self.place}\0{self.version}".encode(), digest_size=5).digest(), "big")

    def identify(self, row: int) -> int:
        """A number that no other trajectory of the run has."""
        return self.key << _ROW_BITS | row

    def open_parquet(self) -> pq.ParquetFile:
        """Open a step file; the caller closes it.

        Raises:
            OSError: it is gone.
            pyarrow.ArrowException: it is damaged.
        """
        if isinstance(self.path, Path):
            return pq.ParquetFile(str(self.path))
        return pq.ParquetFile(self.path.open("rb"), pre_buffer=True)

    def read_rows(self, rows: Sequence[int], columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Read rows of a step file by their numbers, which ascend, group by group.

        Raises: as `open_parquet`.
        """
        first = place = 0
        with self.open_parquet() as parquet:
            for group in range(parquet.num_row_groups):
                end = first + parquet.metadata.row_group(group).num_rows
                here = []
                while place < len(rows) and rows[place] < end:
                    here.append(rows[place] - first)
                    place += 1
                if here:
                    yield parquet.read_row_group(group, columns=columns, use_threads=False).take(here)
                first = end


def name_place(label: str) -> str:
    """The place of a validation: its label, unless that is the place of a step's file."""
    return label if _STEP_PLACE.fullmatch(label) is None else f"validation-{label}"


def parse_step(place: str) -> int | None:
    """The step that a place names; None for a validation."""
    match = _STEP_PLACE.fullmatch(place)
    return int(match[1]) if match else None


def list_files(run: UPath) -> list[DataFile]:
    """List the step files of a run, the latest first, then its validations. A folder that is missing has none."""
    found = []
    for name, path, version in _list_folder(run / "trajectories"):
        if match := _STEP_FILE.fullmatch(name):
            found.append(DataFile(f"step-{int(match[1])}", int(match[1]), path, version))
    found.sort(key=lambda file: -(file.step or 0))
    for name, path, version in sorted(_list_folder(run / "validation")):
        label = name.removesuffix(".jsonl")
        if label != name:
            found.append(DataFile(name_place(label), None, path, version))
    return found


def _list_folder(folder: UPath) -> Iterator[tuple[str, UPath, str]]:
    """(name, path, version) of files."""
    try:
        if isinstance(folder, Path):
            for path in folder.iterdir():
                try:
                    state = path.stat()
                except OSError:
                    continue  # it was deleted meanwhile, or is a link to nowhere
                if is_text(path.name):
                    yield path.name, path, f"{state.st_size}-{state.st_mtime_ns}"
            return
        folder.fs.invalidate_cache()
        for entry in folder.fs.ls(folder.path, detail=True):
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            yield name, folder / name, f"{entry['size']}-{_find_change(entry)}"
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError as error:
        raise RefusedError(f"{folder} may not be read by the console: let its user read the folders of runs") from error


def _find_change(entry: Mapping[str, Any]) -> str:
    """What a file system says about the content of a file besides its size."""
    names = ("ETag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
    return next((str(entry[name]) for name in names if entry.get(name)), "")
