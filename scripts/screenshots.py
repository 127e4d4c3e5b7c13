"""Writes the pictures of the documentation, docs/images/console-*.png, from a run's folder, in Chromium.

    screenshots.py [RUN]     RUN: a folder of a run, by default runs/latest; without either, a run that is made here

The page of two runs compares RUN with the next run in its folder, if there is one. Health and Ask need services of a
run: `make screenshots` takes them in tests/nightly/console_browser.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests/support"), str(REPOSITORY / "libs/records")]

from browser_fixtures import open_chromium  # noqa: E402
from console_browser import IMAGE_HEIGHT, ConsolePage, Site, serve  # noqa: E402
from console_runs import Demo, write_demo  # noqa: E402

HEIGHTS = {"runs": 420, "run": 960, "trajectory": 680, "questions": 560}
DARK = ("run", "trajectory")
STEP = 10


def read(site: Site, path: str) -> Any:
    with urllib.request.urlopen(f"{site.home}/api{path}") as reply:
        return json.load(reply)


def list_views(site: Site, run: str) -> dict[str, str]:
    """Name of each picture → address of its page: the step whose searching was reinforced most is looked at."""
    saved = read(site, f"/runs/{run}")["saved_steps"]
    if not saved:
        raise SystemExit(f"{run} has kept no trajectories: trainer.rollout_data_freq says which steps do")
    step = STEP if STEP in saved else saved[0]
    page = read(site, f"/runs/{run}/trajectories?place=step-{step}&searches_min=1&sort=search_advantage&limit=1")
    best = page["rows"][0]
    watched = read(site, f"/runs/{run}/questions?watched=true")["rows"] or read(site, f"/runs/{run}/questions")["rows"]
    question = max(watched, key=lambda row: (row["changes"], sum((point["em"] or 0) == 0 for point in row["points"])))
    others = [row["id"] for row in read(site, "/runs")["runs"] if row["id"] != run and row["step"] > 0]
    home = f"/runs/{run}"
    views = {
        "runs": "/",
        "run": home,
        "step": f"{home}/steps/{step}",
        "trajectories": f"{home}/trajectories?place=step-{step}&searches_min=1&sort=search_advantage",
        "trajectory": f"{home}/trajectories/{best['place']}/{best['row']}?colour=advantage",
        "group": f"{home}/groups/{best['place']}/{quote(best['uid'], safe='')}",
        "questions": f"{home}/questions?watched=1",
        "question": f"{home}/questions/{quote(question['uid'], safe='')}",
    }
    return views | ({"compare": f"/compare?a={run}&b={others[0]}"} if others else {})


def write_pictures(page: ConsolePage, run: str) -> None:
    for name, path in list_views(page.site, run).items():
        for suffix in ("", "-dark") if name in DARK else ("",):
            page.open(path, dark=bool(suffix))
            if name == "run":
                page.wait_for("[data-testid=curve] .u-over")
            page.write_screenshot(f"console-{name}{suffix}", HEIGHTS.get(name, IMAGE_HEIGHT))


def main(arguments: list[str]) -> None:
    chosen = Path(arguments[0] if arguments else REPOSITORY / "runs/latest")
    if arguments and not chosen.is_dir():
        raise SystemExit(f"{chosen} is no folder of a run")
    with tempfile.TemporaryDirectory() as temporary:
        if chosen.is_dir():
            run = chosen.resolve()
        else:
            run = write_demo(Path(temporary, "runs/demo"))
            write_demo(run.parent / "other", Demo(seed=1, settings=["trainer.actor.optim.lr=0.0003"]))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        with serve(address, run.parent, Path(temporary)) as site, open_chromium(Path(temporary, "profile")) as browser:
            write_pictures(ConsolePage(browser, site), run.name)


if __name__ == "__main__":
    main(sys.argv[1:])
