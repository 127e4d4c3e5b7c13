"""Every test here has the browser, and the console over runs that are made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser_fixtures import chromium
from browser_runs import HOSTILE_RUN, LIVE, write_broken, write_hostile
from console_browser import AXE, ConsolePage, Site, serve
from console_runs import Demo, write_demo
from selenium.webdriver import Chrome

__all__ = ["chromium"]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `demo` and `other`, one whose texts attack the reader, and broken ones."""
    folder = tmp_path_factory.mktemp("console") / "runs"
    write_demo(folder / "demo")
    write_demo(folder / "other", Demo(seed=1, settings=["trainer.actor.optim.lr=0.0003"]))
    (folder / "latest").symlink_to("demo")
    write_hostile(folder / HOSTILE_RUN)
    write_broken(folder)
    return folder


@pytest.fixture(scope="session")
def site(runs: Path, free_address: Callable[[], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The console over these runs."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: run 'make console'")
    with serve(free_address(), runs, tmp_path_factory.mktemp("cache")) as found:
        yield found


@pytest.fixture
def page(chromium: Chrome, site: Site) -> ConsolePage:
    return ConsolePage(chromium, site)


@pytest.fixture
def live_run(runs: Path) -> Iterator[Path]:
    """A run that has taken three of its steps, for a test to go on with."""
    folder = write_demo(runs / "live", LIVE)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
