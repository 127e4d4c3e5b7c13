"""Writes the OpenAPI description of the console's interface to stdout; `make console` makes TypeScript types of it.

.venvs/console/bin/python scripts/console_types.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

from upath import UPath

from forage_console.app import make_app
from forage_console.context import Console
from forage_runtime.settings import Settings

PROSE = frozenset({"description", "summary", "title", "version"})


def drop_prose(value: Any) -> Any:
    """Leave out what is text for readers: types change only with the interface. A property may have such a name."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if key not in PROSE or not isinstance(inner, str)}
        return {key: drop_prose(inner) for key, inner in kept.items()}
    return [drop_prose(inner) for inner in value] if isinstance(value, list) else value


def main() -> None:
    json.dump(drop_prose(make_app(Console(UPath("runs"), Settings())).openapi()), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
