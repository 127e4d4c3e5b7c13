"""Writes what the Redis of compose and of the chart starts with, from the code: users' rights and functions.

usage: redis_files.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forage_queue.streams.functions import build_facts, build_library
from forage_queue.streams.users import Role, list_rules, name_user

FOLDER = Path(__file__).resolve().parents[1] / "deploy/helm/forage/files/redis"


def build_files() -> dict[str, str]:
    """Name → content."""
    rules = "".join(f"{' '.join([name_user(role), *list_rules(role)])}\n" for role in Role)
    facts = build_facts({"appendfsync": "@appendfsync@"})
    return {"users.rules": rules, "functions.lua": build_library().code, "facts.lua": facts.code}


def main() -> None:
    """Write the files, or exit with 1 if they are not current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    is_check = parser.parse_args().check
    for name, content in build_files().items():
        file = FOLDER / name
        if not is_check:
            file.write_text(content, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != content:
            sys.exit(f"{file} is not current: run 'make reference'")


if __name__ == "__main__":
    main()
