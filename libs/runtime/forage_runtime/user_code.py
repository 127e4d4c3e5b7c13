"""Loads Python code of the user's own that a setting names: FILE.py:NAME or MODULE:NAME.

The caller names the setting before the error's sentence, checks what was loaded, and chooses the process: foreign code
runs while it is loaded. Confined processes import this module, so it imports nothing large.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from forage_runtime.errors import UserError

EXPECTED = "FILE.py:NAME or MODULE:NAME"


class UserCodeError(UserError):
    """Code cannot be loaded. The sentence begins with what was named; the cause is what the code raised, if it did."""


def load_object(source: str) -> Any:
    """Load what FILE.py:NAME or MODULE:NAME names; a file is relative to the working directory.

    Raises:
        UserCodeError: there is no such code, it raised, or has no such name.
    """
    place, _, name = source.rpartition(":")
    if not place or not name:
        raise UserCodeError(f"'{source}' names no code: expected {EXPECTED}")
    with name_errors(source):
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        if not hasattr(module, name):
            raise UserCodeError(f"'{source}' cannot be loaded: {place} has no '{name}': define it, or name another")
        return getattr(module, name)


@contextmanager
def name_errors(source: str) -> Iterator[None]:
    """Turn whatever foreign code raises while it is loaded, SystemExit included, into a UserCodeError."""
    try:
        yield
    except UserCodeError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"'{source}' cannot be loaded ({type(error).__name__}: {error}): correct it") from error


def _import_file(path: Path) -> ModuleType:
    name = f"forage_user_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise UserCodeError(f"'{path}' is not a Python file{where}: expected an existing .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: a dataclass looks for the module of its annotations
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
