"""Every page of the console over a run like that of `make demo`: content, themes, widths, accessibility, keys."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

import pytest
from console_browser import ConsolePage
from selenium.webdriver import Keys

GROUP, QUESTION = quote("world_facts/train/0/6", safe=""), quote("world_facts/test/3", safe="")


@dataclass(frozen=True)
class View:
    """A page: its address, the title it must have, and texts that it must show."""

    path: str
    title: str
    texts: tuple[str, ...]


VIEWS = {
    "runs": View("/", "Runs", ("demo", "other", "tiny-policy", "grpo")),
    "compare": View(
        "/compare?a=demo&b=other", "Two runs", ("trainer.actor.optim.lr", "0.0003", "world_facts", "reward_mean")
    ),
    "run": View("/runs/demo", "demo", ("step 40 of 40", "Reward", "Exact match", "Where the step's time goes")),
    "step": View("/runs/demo/steps/10", "Step 10", ("Groups", "Advantages", "dead", "Where searching was reinforced")),
    "trajectories": View("/runs/demo/trajectories", "Trajectories", ("96 of 96 trajectories", "Kima Kieza")),
    "trajectory": View(
        "/runs/demo/trajectories/step-20/3?colour=advantage",
        "Kima Kieza",
        ("Luanda", "Why", "Turn 1", "reward 1"),
    ),
    "group": View(f"/runs/demo/groups/step-10/{GROUP}", "", ("Kima Kieza", "mean")),
    "questions": View("/runs/demo/questions", "Questions", ("14 questions", "watched", "Luanda")),
    "question": View(f"/runs/demo/questions/{QUESTION}", "", ("Ponta Grossa", "validation")),
    "health": View("/runs/demo/health", "Health", ("No service answers",)),
    "ask": View("/runs/demo/ask", "Ask", ()),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_page_is_whole_in_both_themes_and_on_a_telephone(page: ConsolePage, name: str) -> None:
    view = VIEWS[name]
    page.open(view.path)
    assert view.title in page.wait_for("h1").text
    text = page.read_text()
    assert [part for part in view.texts if part not in text] == []
    assert page.list_flaws() == []
    page.set_window(1280, 900, dark=True)
    assert page.list_flaws() == []
    page.set_window(390, 844)
    page.settle()
    assert page.list_flaws() == []


def test_the_search_that_was_reinforced_most_is_five_clicks_away(page: ConsolePage) -> None:
    page.open("/")
    page.click("a", "demo")
    page.wait_for_address("/runs/demo")
    page.open("/runs/demo/steps/10")
    page.click("[data-testid=most-reinforced]")
    page.wait_for_address("sort=search_advantage")
    page.click("[data-testid=trajectory-row] a")
    page.wait_for_address("/trajectories/step-10/")
    assert "advantage" in page.wait_for("[data-testid=why]").text
    advantage = page.wait_for("[data-testid=turn-advantage]", "+")
    assert float(advantage.text.split("+")[1].split()[0]) > 1


def test_a_filter_is_in_the_address_and_taken_back(page: ConsolePage) -> None:
    page.open("/runs/demo/trajectories")
    page.type("[data-testid=filters] input[type=search], [data-testid=filters] input[type=text]", "Shahrud")
    page.wait_for_address("text=Shahrud")
    found = page.wait_for("[data-testid=found]", " of 96")
    page.wait(lambda: not found.text.startswith("96 "), "the list is not filtered")
    count = int(found.text.split()[0])
    assert 0 < count < 96
    assert all("Shahrud" in text for text in page.read_texts("[data-testid=trajectory-row]"))
    page.open(page.driver.current_url.removeprefix(page.site.home))
    assert page.wait_for("[data-testid=found]").text.startswith(f"{count} of 96")
    page.open("/runs/demo/trajectories?right=false&place=step-40")
    wrong = int(page.wait_for("[data-testid=found]").text.split()[0])
    assert 0 < wrong < 24
    assert page.read_texts("[data-testid=chips] button") != []
    page.click("[data-testid=chips] button", "Clear all")
    page.wait_for("[data-testid=found]", "96 of 96")


def test_keys_move_through_lists_and_pages(page: ConsolePage) -> None:
    page.open("/runs/demo/trajectories")
    page.press("j", "j", "k", "j")
    page.press(Keys.ENTER)
    page.wait_for_address("/trajectories/step-40/")
    first = page.driver.current_url
    page.wait(lambda: "2 of " in page.read_text(), "the trajectory is not shown")
    page.press("j")
    page.wait(lambda: page.driver.current_url != first, "j does not lead to the next trajectory")
    page.wait(lambda: "3 of " in page.read_text(), "the next trajectory is not shown")
    page.press("k")
    page.wait(lambda: page.driver.current_url == first, "k does not lead back")
    page.press("?")
    assert "Next trajectory" in page.wait_for("[data-testid=keys]").text
    page.press(Keys.ESCAPE)
    page.wait(lambda: not page.read_texts("[data-testid=keys]"), "the keys stay open")
    page.press("g", "r")
    page.wait_for("h1", "Runs")
    page.press("/")
    page.press("oth")
    page.wait(lambda: page.read_texts("tbody tr") and "demo" not in page.read_texts("tbody tr")[0], "no search")
    assert "text=oth" in page.driver.current_url


def test_the_theme_can_be_chosen_and_stays(page: ConsolePage) -> None:
    def read_background() -> str:
        return str(page.run("return getComputedStyle(document.body).backgroundColor"))

    page.open("/")
    light = read_background()
    page.click("[data-testid=theme-toggle]")
    page.wait(lambda: read_background() != light, "the theme does not change")
    dark = read_background()
    page.driver.refresh()
    page.settle()
    assert read_background() == dark
    page.click("[data-testid=theme-toggle]")
    page.wait(lambda: read_background() == light, "the theme does not change back")
    page.run("localStorage.clear()")


def test_a_curve_leads_to_its_step(page: ConsolePage) -> None:
    page.open("/runs/demo")
    page.run("document.querySelector('[data-testid=curve]').scrollIntoView({block: 'center'})")
    page.click("[data-testid=curve] .u-over")
    page.wait_for_address("/steps/")
    assert page.wait_for("h1").text.startswith("Step ")
