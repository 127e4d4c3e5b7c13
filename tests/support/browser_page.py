"""A page in a real browser: checks that apply to every page, and the actions of a reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

_FLAWS = """
const found = [], seen = new Set();
for (const {id} of document.querySelectorAll("[id]"))
  seen.has(id) ? found.push(`two elements are #${id}`) : seen.add(id);
for (const svg of document.querySelectorAll("svg")) {
  const box = svg.getBoundingClientRect();
  if (!svg.getAttribute("aria-label")) found.push("a figure without a label");
  if (!svg.querySelector("path") || box.width < 100 || box.height < 50) found.push(`an empty figure: ${svg.ariaLabel}`);
}
for (const use of document.querySelectorAll("use"))
  if (!document.querySelector(use.getAttribute("href"))) found.push(`${use.getAttribute("href")} leads nowhere`);
for (const control of document.querySelectorAll("input, button, summary"))
  if (!(control.textContent.trim() || control.labels?.[0]?.textContent.trim())) found.push("a control without a name");
if (document.documentElement.scrollWidth > window.innerWidth) found.push("the page is wider than the window");
for (const entry of performance.getEntriesByType("resource")) found.push(`fetched ${entry.name}`);
return found;
"""


class Page:
    """One open page."""

    def __init__(self, driver: Chrome, file: Path, width: int, dark: bool) -> None:
        self.driver = driver
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        # The window itself cannot be narrower than 500 pixels.
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(file.resolve().as_uri())

    def list_flaws(self) -> list[str]:
        """List defects of the page: errors on the console, ids given twice, figures that are empty or have no label,
        anything fetched, content beyond the window's edge."""
        defects: list[str] = self.driver.execute_script(_FLAWS)
        return [entry["message"] for entry in self.driver.get_log("browser")] + defects

    def run(self, script: str) -> Any:
        """Run a script and return its value."""
        return self.driver.execute_script(script)

    def read_texts(self, selector: str) -> list[str]:
        """Return the texts of the visible elements."""
        return [one.text for one in self.driver.find_elements(By.CSS_SELECTOR, selector) if one.is_displayed()]

    def read_column(self, table: str, place: int) -> list[str]:
        """Return the cells of a table's column, counted from 0."""
        return self.read_texts(f"{table} tbody td:nth-child({place + 1})")

    def click(self, selector: str) -> None:
        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def type(self, selector: str, text: str) -> None:
        """Replace the text of an input."""
        field = self.driver.find_element(By.CSS_SELECTOR, selector)
        field.clear()
        field.send_keys(text)

    def read_style(self, selector: str, name: str) -> str:
        """Return the computed value of a style property."""
        script = "return getComputedStyle(document.querySelector(arguments[0])).getPropertyValue(arguments[1])"
        return str(self.driver.execute_script(script, selector, name))

    def write_screenshot(self, file: Path) -> None:
        """Write the full page as PNG."""
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return window.innerWidth")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.save_screenshot(str(file))
