"""A real headless Chromium, one for all tests of a session; `pytest_plugins = ["browser_fixtures"]` brings it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser_page import Page
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # a page that needs the network fails
)

MISSING = "no Chromium: apt-get install chromium chromium-driver"


@contextmanager
def open_chromium(profile: Path) -> Iterator[Chrome]:
    """The browser and the driver of the system: given by path, Selenium looks for neither and downloads nothing."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        raise FileNotFoundError(MISSING)
    options = ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to sandbox what root runs
    browser = Chrome(options, ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """The browser; without one, tests that need it are skipped."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip(MISSING)
    with open_chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def open_page(chromium: Chrome) -> Callable[..., Page]:
    """`open_page(file, width=1200, dark=False)`: the page, which has no flaws."""

    def open_one(file: Path, width: int = 1200, dark: bool = False) -> Page:
        page = Page(chromium, file, width, dark)
        assert page.list_flaws() == []
        return page

    return open_one
