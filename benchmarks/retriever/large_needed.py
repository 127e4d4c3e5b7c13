"""Queries a second that a run needs, as `forage plan` says; runs in the command line's environment, prints JSON.

    .venvs/cli/bin/python benchmarks/retriever/large_needed.py RECIPE VALUES

The machine is the retriever of a chart's values file: the CPUs that a pod may use, and its replicas.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from forage_cli.planning.assumptions import Assumptions
from forage_cli.planning.retrieval.capacity import Machine, estimate_retrieval
from forage_common.settings import settings_from_arguments


def main(recipe: str, values: str) -> None:
    """Print what the run needs, and what its own settings give."""
    chart = yaml.safe_load(Path(values).read_text())["retriever"]
    cpus = int(chart["resources"]["limits"]["cpu"])
    replicas = int(chart.get("replicas", 1))
    settings = settings_from_arguments(["--config", recipe])
    retrieval = estimate_retrieval(settings, Machine(cpus, replicas), Assumptions())
    if retrieval is None:
        sys.exit(f"{recipe} has no searches: give a recipe whose environment searches")
    cost = retrieval.cost
    print(
        json.dumps(
            {
                "needed": retrieval.needed,
                "searching": retrieval.searching,
                "limit_s": retrieval.limit_s,
                "cpus": cpus,
                "replicas": replicas,
                "thread_use": Assumptions().thread_use,
                "service_s": cost.service if cost else None,
                "precision": str(settings.retriever.encoder.precision),
                "factory": settings.retriever.faiss_factory,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
