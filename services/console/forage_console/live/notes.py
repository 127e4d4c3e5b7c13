"""What people write about a run: a file in its folder."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from upath import UPath

from forage_console.models.runs import RunNotes
from forage_runtime.clients.calls import RefusedError
from forage_runtime.files.durable import write_atomically

FILE = "notes.json"
_WRITING = threading.Lock()


def write_notes(folder: UPath, notes: RunNotes) -> RunNotes:
    """Replace note and tags of a run. Equal tags count once.

    Raises:
        RefusedError: the folder cannot be written.
    """
    notes = RunNotes(note=notes.note, tags=list(dict.fromkeys(notes.tags)))
    content = notes.model_dump_json(indent=1) + "\n"
    file = folder / FILE
    try:
        with _WRITING:
            if isinstance(file, Path):
                write_atomically(Path(os.fspath(file)), content)  # a link is replaced, not followed
            else:
                file.write_text(content, encoding="utf-8")  # an object store shows a file when it is whole
    except OSError as error:
        reason = error.strerror or str(error)
        raise RefusedError(
            f"notes of {folder.name} cannot be written ({reason}): the console needs to write in the folder of the run"
        ) from error
    return notes
