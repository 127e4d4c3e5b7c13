"""The environment of a process in a locale that is not UTF-8."""

from __future__ import annotations

import os


def build_ascii_environment() -> dict[str, str]:
    """That of this process, in the locale C; Python would take it for UTF-8 without the two switches."""
    return os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
