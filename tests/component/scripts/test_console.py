"""`scripts/console.sh` in a copy of what it reads, with a Node and an npm that write down what they are asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from check_structure import REPOSITORY

WEB = "services/console/web"
STATIC = "services/console/forage_console/static"
NODE = """#!/bin/sh
[ "$1" = --version ] && echo v22.13.0 || exit "${OLD:-0}"
"""
NPM = """#!/bin/sh
echo "npm $*" >> "$LOG"
case "$*" in
  *" ci") mkdir -p node_modules; exit "${CI_FAILS:-0}" ;;
  *build) mkdir -p ../forage_console/static; exit "${BUILD_FAILS:-0}" ;;
esac
"""


class Checkout:
    """A front end of two files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "log"
        for name in ("scripts/console.sh", f"{WEB}/package.json", f"{WEB}/package-lock.json"):
            self.write(name, (REPOSITORY / name).read_text())
        shutil.copymode(REPOSITORY / "scripts/console.sh", root / "scripts/console.sh")
        for name in (f"{WEB}/src/main.tsx", f"{WEB}/src/main.test.tsx", "cli/forage_cli/reports/theme.css"):
            self.write(name, "")
        self.write("bin/node", NODE, 0o755)
        self.write("bin/npm", NPM, 0o755)

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def build(self, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
        """Exit status, the last line of the errors, and what npm was asked for."""
        self.log.write_text("")
        variables = os.environ | {"LOG": str(self.log), "PATH": f"{self.root / 'bin'}:/usr/bin:/bin"}
        script = self.root / "scripts/console.sh"
        ended = subprocess.run([script, *arguments], env=variables | environment, capture_output=True, text=True)
        calls = [line.split()[-1] for line in self.log.read_text().splitlines()]
        return ended.returncode, (ended.stderr.splitlines() or [""])[-1], calls


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_pages_are_built_once_for_what_they_are_built_from(checkout: Checkout) -> None:
    assert checkout.build()[2] == ["ci", "build"]
    assert checkout.build() == (0, "", [])
    checkout.write(f"{WEB}/src/main.test.tsx", "a test is no part of a page")
    assert checkout.build() == (0, "", [])
    checkout.write(f"{WEB}/node_modules/react/index.js", "nor are the packages, but for their lock")
    assert checkout.build() == (0, "", [])


@pytest.mark.parametrize("name", [f"{WEB}/src/main.tsx", f"{WEB}/src/new.ts", "cli/forage_cli/reports/theme.css"])
def test_a_changed_source_is_built_without_installing_again(checkout: Checkout, name: str) -> None:
    checkout.build()
    checkout.write(name, "changed")
    assert checkout.build()[2] == ["build"]


def test_a_changed_lock_installs_and_builds(checkout: Checkout) -> None:
    checkout.build()
    checkout.write(f"{WEB}/package-lock.json", "{}")
    assert checkout.build()[2] == ["ci", "build"]


def test_pages_that_are_gone_are_built_again(checkout: Checkout) -> None:
    checkout.build()
    shutil.rmtree(checkout.root / STATIC)
    assert checkout.build()[2] == ["build"]


def test_what_failed_is_said_in_a_sentence_and_tried_again(checkout: Checkout) -> None:
    status, error, _ = checkout.build(CI_FAILS="1")
    assert status == 2
    assert error.endswith("check the network and npm's registry, then run 'make console' again")
    assert checkout.build(BUILD_FAILS="1")[:2] == (2, "console: the pages could not be built (see above)")
    assert checkout.build()[2] == ["build"]


def test_without_a_node_that_is_new_enough_and_without_uv_the_remedy_is_named(checkout: Checkout) -> None:
    status, error, calls = checkout.build(OLD="1")
    assert (status, calls) == (2, [])
    assert (
        error
        == "console: Node 20.19 or newer is missing, and so is uv to install it: install Node, or run 'make setup'"
    )


def test_an_unknown_word_is_refused(checkout: Checkout) -> None:
    assert checkout.build("deploy")[:2] == (
        2,
        "console: 'deploy' is not known, expected build, types, check, format or test",
    )


def test_types_need_the_environment_of_the_console(checkout: Checkout) -> None:
    status, error, _ = checkout.build("types")
    assert (status, error) == (2, "console: the console's environment is missing: run 'scripts/setup.sh console'")
