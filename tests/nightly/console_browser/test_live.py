"""Pages while a run goes on, while the server is away, and over runs that are hostile or broken."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from browser_runs import HOSTILE, HOSTILE_RUN, LIVE
from console_browser import ConsolePage, serve
from console_runs import answer_greedily, append_event, append_step, write_state, write_validation
from selenium.webdriver import Chrome

_ATTACKED = """
const elements = "img[src=x], script:not([src]), [onload], [onerror], [onclick], a[href^='javascript:']";
return [window.hacked, document.querySelectorAll(elements).length];
"""


def test_a_run_moves_on_the_page_while_it_goes_on(page: ConsolePage, live_run: Path) -> None:
    page.open("/runs/live")
    page.wait_for("[data-testid=run-progress]", "step 3 of 8")
    append_step(live_run, LIVE, 4, time.time())
    page.wait_for("[data-testid=run-progress]", "step 4 of 8")
    records = [answer_greedily(LIVE, number, 4) for number in range(3)]
    write_validation(live_run, "step-4", 4, records)
    page.run("history.replaceState(null, '', '?tab=validations')")
    page.click("[role=tab]", "Validations")
    page.wait_for("[role=tabpanel]", "step-4")
    append_event(live_run, time.time(), "restart", "died after 3 s (exit code 1)", None, service="rollout")
    page.click("[role=tab]", "Events")
    page.wait_for("[role=tabpanel]", "died after 3 s")
    for step in range(5, 9):
        append_step(live_run, LIVE, step, time.time())
    write_state(live_run, "done", 8, 8)
    page.wait_for("[data-testid=run-progress]", "step 8 of 8")
    page.wait_for("main", "done")
    assert page.list_errors() == []


def test_the_list_of_runs_moves_too(page: ConsolePage, live_run: Path) -> None:
    page.open("/")
    row = "tr[data-run=live]"
    page.wait_for(row, "3")
    append_step(live_run, LIVE, 4, time.time())
    page.wait_for(row, "4")
    write_state(live_run, "done", 8, 8)
    page.wait_for(row, "done")


@pytest.mark.parametrize(
    "path", ["", "/steps/2", "/trajectories", "/trajectories/step-2/{row}", "/questions", "/health"]
)
def test_a_hostile_run_is_text(page: ConsolePage, path: str) -> None:
    for row in (0, 9) if "{row}" in path else (0,):
        page.open(f"/runs/{quote(HOSTILE_RUN, safe='')}{path.format(row=row)}", width=390)
        assert page.run(_ATTACKED) == [None, 0]
        assert page.list_errors() == []
        assert page.run("return document.documentElement.scrollWidth <= innerWidth"), "a long word widens the page"


def test_texts_of_a_hostile_run_are_shown_as_they_are(page: ConsolePage) -> None:
    run = quote(HOSTILE_RUN, safe="")
    page.open(f"/runs/{run}/trajectories/step-2/0")
    assert HOSTILE[0] in page.read_text()
    page.open(f"/runs/{run}/questions/{quote('world_facts/test/1', safe='')}")
    assert HOSTILE[1] in page.read_text()
    page.open(f"/runs/{run}?tab=settings")
    assert page.run(_ATTACKED) == [None, 0]
    page.open(f"/compare?a={run}&b={run}")
    assert page.run(_ATTACKED) == [None, 0]
    page.open("/")
    assert "<script>hacked(10)</script>" in page.read_text()
    assert page.run(_ATTACKED) == [None, 0]


def test_a_text_of_a_megabyte_is_shown(page: ConsolePage) -> None:
    page.open(f"/runs/{quote(HOSTILE_RUN, safe='')}/questions/{quote('world_facts/test/99', safe='')}")
    assert "a long thought, again and again" in page.read_text()[:100_000]


def test_a_broken_run_says_what_is_wrong(page: ConsolePage) -> None:
    page.open("/")
    assert "broken" in page.wait_for("tr[data-run=broken]").text
    page.open("/runs/broken")
    assert "settings.yaml cannot be read" in page.wait_for("[data-testid=warnings]").text
    assert page.list_flaws() == []
    page.open("/runs/broken/trajectories/step-2/0")
    assert "Why" in page.read_text(), "what can be read is shown"


def test_a_half_written_run_is_shown_as_far_as_it_is_there(page: ConsolePage) -> None:
    page.open("/runs/half")
    warnings = page.wait_for("[data-testid=warnings]").text
    assert "before.jsonl is damaged at line 3" in warnings
    assert "step-2.json holds no JSON object" in warnings
    page.wait_for("[data-testid=run-progress]", "step 3")
    assert page.list_flaws() == []
    page.open("/runs/half/trajectories/step-2/0")
    assert "step-2 cannot be read" in page.wait_for("[data-testid=error]").text
    page.open("/runs/half/trajectories")
    page.wait_for("[data-testid=found]")


@pytest.mark.parametrize("path", ["/runs/nothing", "/runs/demo/trajectories/step-10/999", "/runs/demo/questions/none"])
def test_what_is_not_there_is_a_sentence(page: ConsolePage, path: str) -> None:
    page.open(path)
    assert "there is no" in page.wait_for("[data-testid=error]").text or "has the question" in page.read_text()


def test_a_page_outlives_its_server(
    chromium: Chrome, live_run: Path, free_address: Callable[[], str], tmp_path: Path
) -> None:
    with serve(free_address(), live_run.parent, tmp_path) as site:
        page = ConsolePage(chromium, site)
        page.open("/runs/live")
        page.wait_for("[data-testid=run-progress]", "step 3 of 8")
        site.stop()
        page.wait_for("[data-testid=connection]", "Connection lost")
        assert "step 3 of 8" in page.read_text(), "what was there stays"
        append_step(live_run, LIVE, 4, time.time())
        site.start()
        page.wait_for("[data-testid=run-progress]", "step 4 of 8")
        page.wait(lambda: "Connection lost" not in page.read_text(), "the page does not see that it is connected")
        append_step(live_run, LIVE, 5, time.time())
        page.wait_for("[data-testid=run-progress]", "step 5 of 8")


def test_notes_and_tags_are_kept(page: ConsolePage, live_run: Path) -> None:
    page.open("/")
    page.click("tr[data-run=live] button", "note")
    page.wait_for("tr[data-run=live] textarea").send_keys("searches <b>twice</b>")
    page.click("h1")
    page.wait(lambda: (live_run / "notes.json").exists(), "the note is not written")
    assert json.loads((live_run / "notes.json").read_text())["note"] == "searches <b>twice</b>"
    page.open("/runs/live")
    assert "searches <b>twice</b>" in page.read_text()
