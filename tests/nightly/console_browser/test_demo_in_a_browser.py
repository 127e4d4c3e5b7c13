"""A short demo as its reader sees it in a real browser: while it trains, and when it has ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from urllib.parse import quote

import pytest
from browser_fixtures import chromium
from console_browser import AXE, ConsolePage, Site, serve
from demo import Demo
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

__all__ = ["chromium"]

STEPS, SAVED = 12, 6
SETTINGS = [
    f"trainer.total_training_steps={STEPS}",
    "trainer.rollout_data_freq=3",
    "trainer.save_freq=4",
    "trainer.watch_questions.freq=4",
    "trainer.watch_questions.count=3",
    "data.val_max_samples=8",
    "data.train_batch_size=8",
    "trainer.actor.ppo_mini_batch_size=8",
]
SERVICES = {"redis", "retriever", "reward", "rollout", "trainer", "console"}
QUESTION = "In which country is the city of Iztacalco?"
WRITES_IMAGES = bool(os.environ.get("FORAGE_SCREENSHOTS"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, free_base_port: Callable[[], int]) -> Iterator[Demo]:
    """A demo that trains, with its console."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: run 'make console'")
    demo = Demo(tmp_path_factory.mktemp("demo"), free_base_port(), SETTINGS)
    demo.start("--seed", "1", "--base-port", str(demo.base_port))
    yield demo
    demo.end()


@pytest.fixture(scope="module")
def site(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A console over the demo that has ended, and has taken its own with it."""
    assert demo.finish() == 0, demo.output[-3000:]
    with serve(f"127.0.0.1:{demo.base_port + 50}", demo.runs, tmp_path_factory.mktemp("cache")) as found:
        yield found


@pytest.fixture
def page(chromium: Chrome, site: Site) -> ConsolePage:
    return ConsolePage(chromium, site)


def read_step(page: ConsolePage) -> int:
    """The step that the page of the run shows."""
    return int(page.wait_for("[data-testid=run-progress]", "step").text.split()[1])


def check_health(page: ConsolePage, run: str) -> None:
    page.open(f"{run}/health")
    cards = {str(card.get_attribute("data-service")): card for card in page.find_all("[data-testid=service]")}
    assert set(cards) == SERVICES
    trainer = cards.pop("trainer")
    for card in cards.values():
        assert card.find_element(By.CSS_SELECTOR, "[data-state]").get_attribute("data-state") == "ready", card.text
    shown = trainer.text
    excused = ("not ready: batch", "not ready: validation")  # what a trainer waits for now and then
    assert "not ready" not in shown or any(reason in shown for reason in excused), shown
    assert any("waits" in text for text in page.read_texts("[data-testid=wait]"))
    version = page.wait_for("[data-testid=replicas] tbody td:nth-child(2)").text
    assert int(version.split()[0]) >= 1
    queues = page.read_texts("[data-testid=queues] tbody td:first-child")
    assert set(queues) == {"prompts", "trajectories"}
    assert page.list_flaws() == []
    if WRITES_IMAGES:
        page.write_screenshot("console-health")


def ask(page: ConsolePage, run: str) -> None:
    """Ask until an answer has a search: at its first steps the policy may guess."""
    for _ in range(3):
        page.open(f"{run}/ask?question={quote(QUESTION)}")
        page.click("[data-testid=ask-submit]")
        page.wait_for("[data-testid=ask-turn]")
        page.wait_for("[data-testid=ask-end]")
        assert page.list_flaws() == []
        if page.read_texts("[data-testid=ask-observation] li"):
            break
    assert "Doc" not in page.read_texts("[data-testid=ask-observation]")[0], "passages are shown as such"
    assert any("Iztacalco" in text for text in page.read_texts("[data-testid=ask-observation] li"))
    assert page.wait_for("[data-testid=exchange]").get_attribute("data-state") == "done"
    assert "Answer: " in page.wait_for("[data-testid=ask-end]").text
    if WRITES_IMAGES:
        page.write_screenshot("console-ask")


def explain(page: ConsolePage, run: str) -> None:
    """Ask the reward service of the run why a trajectory has its reward."""
    page.open(f"{run}/trajectories/step-3/0")
    page.click("[data-testid=reward] button", "Explain this reward")
    explanation = page.wait_for("[data-testid=explanation]").text
    assert "By the reward service of this run, now." in explanation
    assert "exact_match" in explanation or "search_r1" in explanation


def test_a_run_is_followed_while_it_trains(
    demo: Demo, chromium: Chrome, tmp_path_factory: pytest.TempPathFactory
) -> None:
    demo.wait_for(lambda: demo.steps >= 1)
    own = Site(f"127.0.0.1:{demo.base_port + 50}", demo.runs, tmp_path_factory.mktemp("unused"))
    assert f"console  {own.home}" in demo.output
    page = ConsolePage(chromium, own)
    run = f"/runs/{demo.run.name}"
    page.open(run)
    before = read_step(page)
    page.run("window.loaded = true")
    page.wait(lambda: read_step(page) > before, "the run does not move on the page")
    assert page.run("return window.loaded"), "the page was loaded again"
    assert page.list_errors() == []
    check_health(page, run)
    demo.wait_for(lambda: demo.steps >= 4)
    ask(page, run)
    explain(page, run)
    assert demo.process.poll() is None, "the run has ended before all was seen"


def test_every_page_shows_the_run_that_has_ended(page: ConsolePage, demo: Demo) -> None:
    run = demo.run.name
    home = f"/runs/{run}"
    views = {
        "/": ("Runs", run, "tiny-policy", "done"),
        f"/compare?a={run}&b={run}": ("Two runs", "reward_mean"),
        home: (f"step {STEPS} of {STEPS}", "done", "Reward", "Exact match", "Entropy"),
        f"{home}/steps/{SAVED}": (f"Step {SAVED}", "Advantages", "Groups", "Where the time went"),
        f"{home}/trajectories": ("256 of 256 trajectories", "right"),
        f"{home}/trajectories/step-{SAVED}/0": ("Why", "Turn 1", "Reward", "Origin"),
        f"{home}/questions": ("11 questions", "watched"),
        f"{home}/health": ("No service answers", *SERVICES - {"console"}),
        f"{home}/ask": ("The policy of this run cannot be asked now",),
    }
    for path, texts in views.items():
        page.open(path)
        text = page.read_text()
        assert [part for part in texts if part not in text] == [], path
        assert page.list_flaws() == [], path
    page.open(f"{home}?tab=validations")
    assert "after" in page.wait_for("[role=tabpanel]", "before").text
    page.open(f"{home}/questions")
    page.click("label", "Only watched")
    page.wait_for("[data-testid=question-total]", "3 questions")
    page.click("tr[data-question] a")
    page.wait_for_address("/questions/world_facts")
    text = page.read_text()
    assert [label for label in ("watch-0", "watch-4", "watch-8", "watch-12") if label not in text] == []
    assert page.list_flaws() == []


def test_from_the_list_of_runs_to_the_group_whose_search_was_reinforced_most(page: ConsolePage, demo: Demo) -> None:
    page.open("/")
    page.click("a", demo.run.name)
    page.wait_for_address(demo.run.name)
    page.wait_for("[data-testid=curve] .u-over")
    page.run("document.querySelector('[data-testid=curve]').scrollIntoView({block: 'center'})")
    page.click("[data-testid=curve] .u-over")  # in the middle, so half of the steps
    page.wait_for_address(f"/steps/{SAVED}")
    page.click("[data-testid=most-reinforced]", "Where searching was reinforced most")
    page.wait_for_address("sort=search_advantage")
    page.click("[data-testid=trajectory-row] a")
    page.wait_for_address(f"/trajectories/step-{SAVED}/")
    assert "colour=advantage" in page.driver.current_url
    assert "search" in page.wait_for("[data-testid=why]").text
    assert float(page.wait_for("[data-testid=turn-advantage]", "+").text.split("+")[1].split()[0]) > 0
    check_colours(page)
    page.click("[data-testid=group-strip] a", "side by side")
    page.wait_for_address("/groups/")
    page.wait(lambda: len(page.read_texts("[data-testid=group-sum]")) == 8, "there are not rollout.n groups' sums")
    assert page.list_flaws() == []


def check_colours(page: ConsolePage) -> None:
    """The demo computes what these colours show."""
    for label, meaning in (
        ("Mismatch", "log-probability of the trainer minus that of the engine"),
        ("KL", "distance from the reference policy"),
        ("Entropy", "how undecided the policy was"),
    ):
        page.click(".modes label", label)
        page.wait_for_address(f"colour={label.lower()}")
        page.wait_for("[data-testid=legend]", meaning)
        tokens = page.find_all("[data-testid=conversation] [data-token]")
        classes = {str(token.get_attribute("class")) for token in tokens} - {""}
        assert classes, f"no token has a colour of {label}"
    assert len(classes) > 1, "tokens differ in entropy"
