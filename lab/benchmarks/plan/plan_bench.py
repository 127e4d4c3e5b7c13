"""`make bench-plan`: what `forage plan` computes, against fake tensors and against published configurations.

First table: the memory of an update, part by part, against PyTorch's memory tracker over fake tensors (`make
bench-memory`): real shapes, no weights, no GPU. "backward" and "step" are whole moments. Second table: configurations
whose publication says that they run, or that they ran out of memory; `published.py` has the sources. Exit status 1: a
whole moment deviates by more than 10 %, or a plan contradicts a publication.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from published import PUBLISHED, Published
from rich.console import Console
from rich.table import Table

from forage_cli.planning.assumptions import GIB
from forage_cli.planning.changes import apply_changes
from forage_cli.planning.gpus import KINDS
from forage_cli.planning.plan import Plan, Request, make_plan
from forage_cli.planning.shapes import KNOWN
from forage_cli.planning.trainer_memory import (
    HEAD_PASS,
    LAYER_PASS,
    STEP,
    describe_training,
    list_moments,
    list_resident,
)
from forage_runtime.settings import Settings

MEMORY_BENCH = Path(__file__).parents[1] / "memory" / "run"
MOST = 0.1
WHOLE = ("backward", "step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--models", nargs="+", default=["Qwen2.5-3B", "Qwen2.5-7B"])
    parser.add_argument("--measured", type=Path, help="file with the JSON line of an earlier `make bench-memory`")
    arguments = parser.parse_args()
    measured = json.loads(arguments.measured.read_text(encoding="utf-8")) if arguments.measured else measure(arguments)
    deviations = [row for place in measured["bytes"] if place["head"] == "fused" for row in compare(place)]
    checked = [check(one) for one in PUBLISHED]
    output = Console(file=sys.stdout)
    output.width = max(output.width, 160)
    output.print(tabulate_deviations(deviations))
    output.print(tabulate_published(checked))
    worst = max(abs(row["deviation"]) for row in deviations if row["part"] in WHOLE)
    wrong = [row["name"] for row in checked if row["plan_fits"] != row["published_runs"]]
    print(
        json.dumps({"worst_deviation": round(worst, 3), "contradicted": wrong, "parts": deviations, "known": checked})
    )
    return 1 if worst > MOST or wrong else 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run `make bench-memory` for an update of several micro-batches."""
    command = [str(MEMORY_BENCH), "--micro-batches", "2", "--tokens", str(arguments.tokens)]
    command += ["--processes", *map(str, arguments.processes), "--models", *arguments.models]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, encoding="utf-8")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(place: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each part of a measurement."""
    shape = KNOWN[place["model"]]
    settings = apply_changes(
        Settings(),
        {
            "trainer.n_gpus_per_node": place["processes"],
            "trainer.actor.use_kl_loss": False,
            "trainer.actor.ppo_max_token_len_per_gpu": place["tokens"],
        },
    )
    training = describe_training(settings, shape)
    resident = {part.name: part.size for part in list_resident(training, shape) if part.size}
    moments = {name: {part.name: part.size for part in parts} for name, parts in list_moments(training, shape).items()}
    held = sum(resident.values())
    layer = moments[LAYER_PASS]
    planned = resident | {
        "activations": layer["layer inputs"] + layer["activations"],
        "logits": moments[HEAD_PASS]["logits"],
        "backward": held + max(sum(moments[name].values()) for name in (HEAD_PASS, LAYER_PASS)),
        "step": held + sum(moments[STEP].values()),
    }
    return [
        {
            "model": place["model"],
            "processes": place["processes"],
            "part": part,
            "plan": size,
            "measured": place[part],
            "deviation": round(size / place[part] - 1, 3),
        }
        for part, size in planned.items()
    ]


def check(one: Published) -> dict[str, Any]:
    """Plan a published configuration."""
    found = make_plan(apply_changes(Settings(), one.settings), Request(KNOWN[one.model], KINDS[one.gpu]))
    return {
        "name": one.name,
        "source": one.source,
        "gpus": f"{one.gpus} × {one.gpu}",
        "published_runs": one.runs,
        "plan_fits": found.fits,
        "trainer_gib": round(found.trainer.total / GIB, 1),
        "rollout_gib": round(found.rollout.memory.total / GIB, 1),
        "limit_gib": round(found.trainer.limit / GIB, 1),
        "sequences": found.rollout.concurrency,
        "published_step_s": list(one.step_s) if one.step_s else None,
        "plan_step_s": round(found.step.total, 1),
        "why": describe_fit(found),
    }


def describe_fit(plan: Plan) -> str:
    return "; ".join(plan.problems) or "fits"


def tabulate_deviations(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Memory of an update, in GiB: plan against fake tensors")
    for column in ("model", "GPUs", "part", "plan", "fake tensors", "deviation"):
        table.add_column(column, justify="left" if column in ("model", "part") else "right")
    for row in rows:
        sizes = (f"{row[name] / GIB:.2f}" for name in ("plan", "measured"))
        table.add_row(row["model"], str(row["processes"]), row["part"], *sizes, f"{row['deviation']:+.1%}")
    return table


def tabulate_published(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Published configurations, in Forage's settings; not measured by us")
    sizes = ("trainer GiB", "rollout GiB", "of", "sequences", "step s", "told, s")
    for column in ("configuration", "GPUs", "published", "plan", *sizes):
        table.add_column(column, justify="right" if column in sizes else "left")
    for row in rows:
        table.add_row(
            row["name"],
            row["gpus"],
            "runs" if row["published_runs"] else "out of memory",
            "fits" if row["plan_fits"] else "does not fit",
            *(str(row[name]) for name in ("trainer_gib", "rollout_gib", "limit_gib", "sequences", "plan_step_s")),
            "to".join(f" {seconds:.0f} " for seconds in row["published_step_s"] or ()).strip(),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
