"""Which documented command lines a machine without GPU, Docker and cluster can run, and which programs they start."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

from forage_runtime.settings import Settings


class Kind(StrEnum):
    """What a command line does, which decides its limit and what runs beside it."""

    ALONE = "runs alone"
    ASKS = "asks services"
    STARTS = "starts services"
    SERVES = "serves until Ctrl-C"


RULES = {
    "needs Prometheus, for a query": r"^query: ",
    "needs a cluster": r"\b(kubectl|helm|amtool|grpcurl)\b",
    "needs Docker": r"\bdocker\b|\b(images|compose)\.sh\b|\bmake (images|up|down|logs|test-compose|pin-images)\b",
    "needs a GPU": r"DEVICE=gpu|\bgpu-check\b|nproc-per-node|n_gpus_per|CUDA_VISIBLE|=colocated|engine_replicas",
    "needs a cluster of Ray": r"ray_address=|ray\.address=|use_existing_app",
    "needs another machine": r"s3://|redis://(?!127|localhost)|\bredis-cli\b|\bhost-[a-z]\b|\b10\.0\.0\.\d",
    "needs a network": (
        r"\b(pipx|npm|audit-update|uv pip install|model smollm2)\b|\bdata (nq|hotpotqa|wiki18)(?!.*--file)|\bdata \$"
    ),
    "needs data or an index of millions of passages": r"wiki-18|IVF\d{4}|data/(nq|bamboogle|\{)|nq/",
    "has a placeholder": r"…|(?<!\w)\[[A-Za-z-]|(?<![\w$=/.{-])[A-Z]{3,}(?![\w=}-])",
    "is run by CI, or at night by itself": (
        r"\bmake (?!demo\b)|\bpytest\b|run_tests\.py|scripts/simulate|lab/benchmarks|fuzz"
    ),
    "is not Forage's command, or makes what the repository holds": r"forage_models\.|PYTHONPATH=models|main_ppo",
    "needs Redis and services that its page leaves to the reader": r"-m forage_(rollout|trainer)\b|:18641/",
    "works for a run beside it until Ctrl-C": r"\bforage worker\b",
    "trains for hours": r"total_training_steps=\d{3,}",
    "follows a log until Ctrl-C": r"\blogs (\w+ )?-f",
    "needs a collector of traces": r"127\.0\.0\.1:4317",
    "needs an index that is replaced": r"ln -sfn|:18610/reload",
    "needs runs of the reader": (r"runs diff first|--run first|--against|--label|runs rm demo-|--step \d"),
    "needs a model of the reader": r"models/e5|~/models|/models/qwen",
}
"""Why a command line is left out → what it is searched for; the first that is found counts."""
_CHECKOUT = re.compile(r"\bmake\b|\.venvs/|\b(lab|scripts|services|deploy|site)/|^cd ")
_SERVES = re.compile(
    r"forage (up(?! --train)|serve|console)\b|-m forage_(reward|retriever|rollout|trainer|console)\b|&$"
)
_STARTS = re.compile(r"\b(make|forage) demo\b|forage (train|eval|probe --questions|up --train)\b(?! compare)")
_ASKS = re.compile(
    r"forage (ask|status|rollout sample)\b|--rerun|coverage .*--search|\bcurl .*(localhost|127\.0\.0\.1)"
)
_NAMED_RUN = re.compile(r"\bruns/(?!latest\b)[\w./-]+")
_READS_RUN = re.compile(r"runs/latest|--resume|forage (trajectories|runs show|logs)\b")
_ABSOLUTE = re.compile(r"(?<![\w.:/}<])/(?!dev/|tmp/)[a-z][\w./-]*")
_RECIPE = re.compile(r"(?:-c|--config|config=)[= ]?(\S+\.yaml)")
_MADE = ("data/world", "data/knowledge_graph", "data/countdown_tiny", "models/tiny", "data/mine")
"""What other commands of the pages make, or the repository holds."""


def find_kind(text: str) -> Kind:
    """Find what a command line does."""
    if "--help" in text:
        return Kind.ALONE
    found = {Kind.SERVES: _SERVES, Kind.STARTS: _STARTS, Kind.ASKS: _ASKS}
    return next((kind for kind, pattern in found.items() if pattern.search(text)), Kind.ALONE)


def find_reason(text: str, missing: Sequence[str], exists: Callable[[str], bool], is_wheel: bool) -> str:
    """Say why a command line is left out; empty: it can be run.

    Args:
        missing: the files that its recipe names and that are not here.
        exists: whether a file or folder is where the command line is run.
    """
    for reason, pattern in RULES.items():
        if re.search(pattern, text):
            return reason
    if is_wheel and _CHECKOUT.search(text.replace(".venvs/cli/bin/", "")):
        return "needs a checkout"
    if absent := [path for path in _ABSOLUTE.findall(text) if not Path(path).exists() and "/v1/" not in path]:
        return f"needs {absent[0]} of the reader"
    if missing and not is_check(text):
        return f"needs {missing[0]}, which is downloaded"
    if unmade := [run for run in _NAMED_RUN.findall(text) if not exists(run)]:
        return f"needs {unmade[0]} of the reader"
    if not exists("runs/latest") and _READS_RUN.search(text) and "--help" not in text:
        return "needs a run, and none was made yet"
    return ""


def is_check(text: str) -> bool:
    """Whether a command line looks at a recipe whose files need not be here."""
    return re.search(r"forage (config|plan)\b|^\w+=\S+$", text) is not None


def find_recipe(text: str) -> str | None:
    """Find the file of settings that a command line names."""
    found = _RECIPE.search(text)
    return found[1] if found else None


def list_missing(settings: Settings, exists: Callable[[str], bool]) -> list[str]:
    """List the models, questions, corpora and indexes of settings that are not here, nor made by other commands."""
    data, index = settings.data, settings.retriever.index
    named = [settings.model.path, *data.train_paths, *data.val_files, data.corpus if index is None else index]
    return [path for path in map(str, named) if not path.startswith(_MADE) and not exists(path)]


def list_outputs(text: str) -> list[str]:
    """List the files that a command line says it writes."""
    return re.findall(r"(?:(?<=-o )|(?<=--out )|(?<=--card )|(?<= > ))(\S+\.\w+)", text)
