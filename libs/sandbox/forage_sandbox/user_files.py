"""Which files belong to a piece of user code: a Python file, or the package of an entry point."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import entry_points


def find_files(source: str, group: str = "") -> tuple[str, ...]:
    """The files and folders that loading the code reads, without running any of it; empty where there are none.

    Args:
        source: FILE.py:NAME, MODULE:NAME, or a name in a group of entry points.
    """
    module, colon, _ = source.rpartition(":")
    if module.endswith(".py"):
        return (os.path.realpath(module),)
    if not colon:
        named = [point.module for point in entry_points(group=group) if point.name == source]
        module = named[0] if named else ""
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        return ()
    if spec is None:
        return ()
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    return tuple(os.path.realpath(place) for place in places if place and os.path.exists(place))
