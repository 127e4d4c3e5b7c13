"""Strikes a real `forage demo` with faults of every kind at seeded random instants, and reports what that cost.

    chaos.py [--seed N] [--kinds KIND,…] [--transports files,delta,direct,s3] [KILLS]     so many faults
    chaos.py --list                                                                       the kinds

Run it in the environment of the cli. It prints a line for each fault, a table, and as its last line one JSON object.
Ctrl-C ends it with what was measured so far. The exit code is 1 if a group was lost or trained on twice, if a token
was sampled under another policy than it names, if anything hung, or if the projected effective training time is too
low.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = REPOSITORY / "configs/search_r1_nq_hotpotqa_grpo_7b.yaml"
"""Costs are projected to this recipe: steps of a minute, and its interval of checkpoints."""
sys.path[:0] = [str(REPOSITORY / "lab"), str(REPOSITORY / "tests/support")]


def main() -> int:
    from chaos.driver import Plan, play
    from chaos.episode import Tally
    from chaos.kinds import KINDS
    from chaos.report import find_slow_kinds, summarize
    from chaos.transports import TRANSPORTS

    from forage_runtime.settings import load_settings

    parser = argparse.ArgumentParser(description="Strike a real run with faults.")
    parser.add_argument("kills", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="comma-separated kinds; all by default")
    parser.add_argument("--transports", default="", help="comma-separated; episodes take them in turn, all by default")
    parser.add_argument("--per-episode", type=int, default=40, help="faults between a start and a clean end")
    parser.add_argument("--calm-s", type=float, default=20.0, help="time without faults in each episode")
    parser.add_argument("--hang-s", type=float, default=180.0, help="time after which a fault counts as a hang")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time after which the last episode ends")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / ".cache/chaos")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders, also of episodes that ended well")
    parser.add_argument("--list", action="store_true", help="list the kinds")
    options = parser.parse_args()
    if options.list:
        print("\n".join(KINDS))
        return 0
    kinds = [kind for kind in options.kinds.split(",") if kind] or list(KINDS)
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kinds {', '.join(sorted(unknown))}; known: {', '.join(KINDS)}")
    folder = options.folder.absolute()
    transports = [name for name in options.transports.split(",") if name] or list(TRANSPORTS)
    if unknown := set(transports) - set(TRANSPORTS):
        parser.error(f"unknown transports {', '.join(sorted(unknown))}; known: {', '.join(TRANSPORTS)}")
    plan = Plan(
        options.kills,
        options.seed,
        folder,
        kinds,
        options.per_episode,
        options.calm_s,
        options.hang_s,
        transports,
        options.minutes,
    )
    # A shell starts what runs in its background deaf to Ctrl-C, and so would be the demo that is ended by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tally = Tally()
    began = time.monotonic()
    interrupted = False
    try:
        play(plan, REPOSITORY, tally, lambda line: print(f"{time.strftime('%H:%M:%S')} {line}", flush=True))
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: what was measured so far")
    except Exception:  # noqa: BLE001 - an hour of measurements is not thrown away for it
        interrupted = True
        traceback.print_exc()
    report = summarize(tally, options.seed, load_settings(RECIPE, []).trainer.save_freq)
    print(report.table)
    for line in find_slow_kinds(report.result):
        print(f"slow: {line}")
    for line in report.failures:
        print(f"failed: {line}")
    print(json.dumps(report.result | {"minutes": round((time.monotonic() - began) / 60, 1)}))
    if not (options.keep or report.failures or interrupted):
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if report.failures or interrupted else 0


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the services would compile torch and its like at every start
    sys.exit(main())
