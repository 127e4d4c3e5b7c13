"""Times in a real Chromium: until a page is drawn, and from frame to frame while it is scrolled."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
WIDTH, HEIGHT = 1400, 1000
LIMIT_S = 60.0
DISTANCE, SPEED = 30_000, 6000
"""Pixels that are scrolled, down and up again, and pixels a second: a reader who looks for something."""
_ROWS = "document.querySelectorAll('[data-testid=trajectory-row] .open').length > 5"
_DRAWN = "document.querySelectorAll('[data-testid=conversation] [data-token]').length > 50"
_SINCE_NAVIGATION = "return performance.now() / 1000"
_RECORD = """
window.frameTimes = [];
let last = performance.now();
const note = (now) => { window.frameTimes.push(now - last); last = now; window.noting = requestAnimationFrame(note); };
window.noting = requestAnimationFrame(note);
"""
_STOP = "cancelAnimationFrame(window.noting); return window.frameTimes.slice(1)"


@dataclass(frozen=True)
class Frames:
    """Frames while a page was scrolled.

    Attributes:
        most_ms: 99 % of them took no longer.
        work_ms: mean processor time of the page's thread for a frame, which other work on the machine does not change.
    """

    count: int
    longest_ms: float
    most_ms: float
    work_ms: float
    open_s: float


class Browser:
    """A headless Chromium with an empty profile."""

    def __enter__(self) -> Browser:
        binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
        if binary is None or driver is None:
            raise SystemExit("there is no Chromium: apt-get install chromium chromium-driver")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = ChromeOptions()
        options.binary_location = binary
        for flag in (*FLAGS, f"--user-data-dir={self._profile.name}", f"--window-size={WIDTH},{HEIGHT}"):
            options.add_argument(flag)
        if os.geteuid() == 0:
            options.add_argument("--no-sandbox")
        self._driver = Chrome(options, ChromeService(driver))
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.quit()
        self._profile.cleanup()

    def measure_first_page(self, url: str) -> float:
        """Seconds from the navigation until rows are drawn."""
        self._driver.get("about:blank")
        self._driver.get(url)
        return self._wait_for(_ROWS)

    def measure_frames(self, url: str) -> Frames:
        """Scroll a trajectory to its end and back."""
        self._driver.get(url)
        open_s = self._wait_for(_DRAWN)
        time.sleep(1)  # wait: what is drawn later is no part of scrolling
        self._driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        worked = self._read_work()
        self._driver.execute_script(_RECORD)
        for distance in (-DISTANCE, DISTANCE):
            gesture = {"x": WIDTH // 3, "y": HEIGHT // 2, "yDistance": distance, "speed": SPEED}
            self._driver.execute_cdp_cmd("Input.synthesizeScrollGesture", gesture)
        times = [float(value) for value in self._driver.execute_script(_STOP)]
        work_ms = 1000 * (self._read_work() - worked) / len(times)
        return Frames(len(times), max(times), statistics.quantiles(times, n=100)[98], work_ms, open_s)

    def _read_work(self) -> float:
        """Seconds of processor time that the page's thread has used."""
        metrics = self._driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        (seconds,) = (float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")
        return seconds

    def _wait_for(self, condition: str) -> float:
        """Wait until a page is drawn: seconds since its navigation, by its own clock."""
        drawn = WebDriverWait(self._driver, LIMIT_S, poll_frequency=0.01)
        return float(drawn.until(lambda driver: driver.execute_script(f"if ({condition}) {_SINCE_NAVIGATION}")))
