"""The console's pages in a real browser: one process and one browser for all tests of a module."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
AXE = REPOSITORY / "services/console/web/node_modules/axe-core/axe.min.js"
IMAGES = REPOSITORY / "docs/images"
IMAGE_WIDTH, IMAGE_HEIGHT, IMAGE_BYTES = 1200, 760, 150_000
PATIENCE_S = 120.0
_SETTLED = """
const busy = document.querySelector("[data-testid=loading], .mantine-Loader-root, .mantine-Skeleton-root");
return document.readyState === "complete" && document.querySelector("h1") !== null && busy === null;
"""
_FLAWS = """
const found = [];
if (document.documentElement.scrollWidth > window.innerWidth) found.push(
  `the page is ${document.documentElement.scrollWidth} wide in a window of ${window.innerWidth}`);
for (const {name} of performance.getEntriesByType("resource"))
  if (new URL(name).host !== location.host) found.push(`fetched ${name}`);
for (const {id} of document.querySelectorAll("[id]"))
  if (document.querySelectorAll(`#${CSS.escape(id)}`).length > 1) found.push(`two elements are #${id}`);
if (document.title === "") found.push("no title");
return found;
"""
_AXE = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ["violations"]}).then(
  ({violations}) => done(violations.filter(({impact}) => impact === "serious" || impact === "critical").map(
    ({id, help, nodes}) => `${id}: ${help}: ${nodes.slice(0, 3).map(({html}) => html.slice(0, 300)).join(" | ")}`)),
  error => done([String(error)]));
"""


class Site:
    """A console process over a folder of runs."""

    def __init__(self, address: str, runs: Path, cache: Path, *settings: str) -> None:
        self.address = address
        self.runs = runs
        self._log = cache / "console.log"
        self._settings = (f"console.http_address={address}", f"run.dir={runs}", f"console.cache_dir={cache}", *settings)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> str:
        return f"http://{self.address}"

    def start(self) -> None:
        """Start the process; returns when it is ready."""
        command = [sys.executable, "-m", "forage_console", *self._settings]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FORAGE__")}
        with self._log.open("ab") as log:  # no pipe, which would fill up
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=REPOSITORY)
        wait_until(self._is_ready, "the console gets ready")

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.read_log()
        try:
            with urllib.request.urlopen(f"{self.home}/readyz", timeout=60):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def read_log(self) -> str:
        """What the process has logged."""
        return self._log.read_text(errors="replace")


@contextmanager
def serve(address: str, runs: Path, cache: Path, *settings: str) -> Iterator[Site]:
    """Serve the runs of a folder while the block runs."""
    site = Site(address, runs, cache, *settings)
    site.start()
    try:
        yield site
    finally:
        site.stop()


class ConsolePage:
    """What a reader sees and does in the browser's one window."""

    def __init__(self, driver: Chrome, site: Site) -> None:
        self.driver = driver
        self.site = site

    def open(self, path: str, width: int = 1280, dark: bool = False, height: int = 900) -> None:
        """Open a page and wait until it is there."""
        self.set_window(width, height, dark)
        self.driver.get_log("browser")  # what the page before has logged
        self.driver.get(f"{self.site.home}{path}")
        self.settle()

    def set_window(self, width: int, height: int, dark: bool = False) -> None:
        """Change the window's size, which can be smaller than the browser's own least one, and the reader's theme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, motion]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def settle(self) -> None:
        """Wait until the page has its data."""
        self.wait(lambda: bool(self.run(_SETTLED)), "the page goes on loading")

    def wait(self, condition: Callable[[], Any], problem: str) -> Any:
        """Wait until a condition is true, and return its value."""

        def check(_: object) -> Any:
            return condition()

        try:
            return WebDriverWait(self.driver, PATIENCE_S, 0.05, [StaleElementReferenceException]).until(check)
        except TimeoutException:
            raise AssertionError(f"{problem}: {self.driver.current_url}\n{self.read_text()[:3000]}") from None

    def wait_for(self, selector: str, text: str = "") -> WebElement:
        """Wait for a visible element, with a text in it."""

        def find() -> WebElement | None:
            shown = (one for one in self.find_all(selector) if one.is_displayed() and text in one.text)
            return next(shown, None)

        element: WebElement = self.wait(find, f"there is no {selector!r} with {text!r}")
        return element

    def wait_for_address(self, part: str) -> None:
        """Wait until the address has a part, and the page is there."""
        self.wait(lambda: part in self.driver.current_url, f"the address has no {part!r}")
        self.settle()

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find_all(self, selector: str) -> list[WebElement]:
        found: list[WebElement] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def read_texts(self, selector: str) -> list[str]:
        """The texts of the visible elements."""
        return [one.text for one in self.find_all(selector) if one.is_displayed()]

    def read_text(self) -> str:
        """The text of the whole page, whether visible or not."""
        return str(self.run("return document.body.innerText"))

    def click(self, selector: str, text: str = "") -> None:
        self.wait_for(selector, text).click()

    def type(self, selector: str, text: str) -> None:
        """Replace the text of an input."""
        field = self.wait_for(selector)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text)

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def list_errors(self) -> list[str]:
        """List what the browser's console has logged as errors."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def list_flaws(self) -> list[str]:
        """List what is wrong with the page: width, hosts, names given twice, findings of axe, errors."""
        if not self.run("return 'axe' in window"):
            self.run(AXE.read_text())
        found = self.run(_FLAWS) + self.driver.execute_async_script(_AXE)
        return [*self.list_errors(), *map(str, found)]

    def write_screenshot(self, name: str, height: int = IMAGE_HEIGHT) -> Path:
        """Write what is visible as PNG into the images of the documentation."""
        IMAGES.mkdir(exist_ok=True)
        size = {"width": IMAGE_WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.settle()
        data = base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])
        assert len(data) <= IMAGE_BYTES, f"{name} has {len(data)} bytes, more than {IMAGE_BYTES}"
        file = IMAGES / f"{name}.png"
        file.write_bytes(data)
        return file
