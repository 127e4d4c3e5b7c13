"""Queries a second that a run needs, as `forage plan` says; runs in the command line's environment, prints JSON.

    .venvs/cli/bin/python lab/benchmarks/retriever/large_needed.py VALUES [GPU]

Settings and hardware are those of a chart's values file: engines and trainer on GPUs of one kind, and the retriever's
CPUs and replicas.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import yaml

from forage_cli.planning.assumptions import Assumptions
from forage_cli.planning.gpus import DEFAULT, get_gpu
from forage_cli.planning.plan import Request, make_plan
from forage_cli.planning.retrieval.capacity import Machine
from forage_cli.planning.shapes import read_shape
from forage_runtime.settings import check_settings


def main(values: str, gpu: str = DEFAULT) -> None:
    """Print what the run needs, and on what its retriever runs."""
    chart = yaml.safe_load(Path(values).read_text(encoding="utf-8"))
    settings = check_settings(chart["settings"])
    retriever = chart["retriever"]
    machine = Machine(int(retriever["resources"]["limits"]["cpu"]), int(retriever.get("replicas", 1)))
    assumed = Assumptions()
    request = Request(read_shape(settings.model.path), get_gpu(gpu), assumed, None, None, machine)
    retrieval = make_plan(settings, request).retrieval
    if retrieval is None:
        sys.exit(f"{values}: its settings search nothing: name the values of a recipe that does")
    print(
        json.dumps(
            {
                "needed": retrieval.needed,
                "mean": retrieval.mean,
                "peak": retrieval.peak,
                "searching": retrieval.searching,
                "limit_s": retrieval.limit_s,
                "gpu": gpu,
                "cpus": machine.cpus,
                "replicas": machine.replicas,
                "thread_use": assumed.thread_use,
                "service_s": retrieval.cost.service if retrieval.cost else 0.0,
                "precision": str(settings.retriever.encoder.precision),
                "type": re.sub(r"IVF\d+", "IVF", settings.retriever.faiss_factory),
                "efforts": [settings.retriever.nprobe, settings.retriever.ef_search],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
