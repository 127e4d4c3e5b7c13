"""Writes docs/reference/models.md from the results of models_trainer.py and models_engine.py. usage: FOLDER"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/reference/models.md"
MARK = "<!-- made by lab/models.sh -->\n"
COLUMNS = ("family", "names", "packs", "served", "in place", "LoRA", "notes")
_LONGEST = 140
"""Characters of an error in the notes."""


class Row:
    """A line of the table.

    Args:
        trainer, engine: results of a family.

    Attributes:
        cells: by column.
        verdicts: column → what is counted.
    """

    def __init__(self, kind: str, trainer: dict[str, Any], engine: dict[str, Any]) -> None:
        self._notes: list[str] = []
        self.verdicts: dict[str, str] = {}
        cells = (
            f"`{kind}`",
            self._describe_names(trainer),
            self._describe_packing(trainer),
            self._compare("served", engine),
            self._compare("in place", engine),
            self._describe_lora(trainer),
        )
        self.cells = [*cells, "; ".join(dict.fromkeys(self._notes))]

    def _describe_names(self, trainer: dict[str, Any]) -> str:
        names = trainer.get("names", trainer)
        self._note("names", names)
        return self._count("names", "wrong" if "error" in names else "right")

    def _describe_packing(self, trainer: dict[str, Any]) -> str:
        trains = trainer.get("trains", trainer)
        if "error" in trains:
            self._note("training", trains)
            return self._count("packs", "not trained")
        problems = {name: tried.get("found", tried.get("error")) for name, tried in trainer["packs"].items()}
        fits = [name for name, problem in problems.items() if problem is None]
        self._count("packs", ", ".join(fits) if fits else "padded")
        if not fits and any("on CPU" in problem for problem in problems.values()):
            self._notes.append("flex_attention has its sinks on GPUs only: not tried")
        if not fits and any("depends on the row" in problem for problem in problems.values()):
            self._notes.append("packed rows would mix")
        return ", ".join(fits) or "padded"

    def _compare(self, column: str, engine: dict[str, Any]) -> str:
        found = engine.get(column.replace(" ", "_"))
        if found is None:
            is_served = "served" in engine
            if column == "in place" and not is_served:
                return self._count(column, "not served", "")
            self._note("in place" if is_served else "vLLM", engine)
            return self._count(column, "refused" if is_served else "no")
        if column == "served":
            if not engine.get("prefix_cache", True):
                self._notes.append("no prefix cache on a CPU")
            if engine["architecture"].startswith("Transformers"):
                self._notes.append("by transformers' own code in vLLM")
        is_right = found["mean"] <= found["bound"]
        verdict = "right" if is_right else "differs"
        if column == "in place" and self.verdicts["served"] == "differs":
            verdict = "differs after a fresh start"
        shown = f"{found['mean']:.0e}, {found['largest']:.0e}"
        return self._count(column, verdict, shown if is_right else f"**{shown}**")

    def _describe_lora(self, trainer: dict[str, Any]) -> str:
        if "error" in trainer.get("trains", trainer):
            return self._count("LoRA", "not trained", "")
        lora = trainer["lora"]
        if "error" in lora:
            self._note("LoRA", lora)
            return self._count("LoRA", "no")
        found = lora["found"]
        counts = [f"{sum(found[part].values())} {part}" for part in ("modules", "experts", "routers") if found[part]]
        how = "merged" if found["merged"] else "adapter"
        return self._count("LoRA", how, f"{', '.join(counts)}: {how}")

    def _note(self, of: str, result: dict[str, Any]) -> None:
        if text := result.get("error"):
            self._notes.append(f"{of}: {_shorten(text)}")

    def _count(self, column: str, verdict: str, shown: str | None = None) -> str:
        self.verdicts[column] = verdict
        return verdict if shown is None else shown


def _shorten(text: str) -> str:
    """An error's first sentence, without the names of classes in front."""
    text = re.sub(r"^((\w+Error|\w+Exception|VllmConfig|Value error|Assertion failed)[:,] )+", "", text)
    text = re.split(r"(?<=[.!]) (?=[A-Z])|(?:, hence )", text)[0].rstrip(".")
    if len(text) > _LONGEST:
        text = text[:_LONGEST].rpartition(" ")[0] + " …"
    return "`" + text.rstrip(":").replace("`", "'") + "`"


def build_page(folder: Path) -> tuple[str, str]:
    """Build what follows the page's mark; and a line that sums it up."""
    rows, versions, seconds = [], {}, Counter[str]()
    for file in sorted(folder.glob("*/trainer.json")):
        results = {stage: file.with_name(f"{stage}.json") for stage in ("trainer", "engine")}
        if not results["engine"].exists():
            continue
        trainer, engine = (json.loads(result.read_text(encoding="utf-8")) for result in results.values())
        versions |= trainer.get("versions", {}) | engine.get("versions", {})
        seconds += Counter(trainer=trainer["seconds"], engine=engine["seconds"])
        rows.append(Row(file.parent.name, trainer, engine))
    counts = {column: Counter(row.verdicts[column] for row in rows) for column in COLUMNS[1:-1]}
    shown = "; ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    lines = [f"Made on {datetime.now(UTC).date()} with {shown}: {len(rows)} families on a CPU.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row.cells) + " |" for row in rows]
    lines += ["", "## Counts", "", "| column | families |", "|---|---|"]
    lines += [
        f"| {column} | {', '.join(f'{verdict}: {number}' for verdict, number in found.most_common())} |"
        for column, found in counts.items()
    ]
    for column, verdict, meaning in (
        ("served", "differs", "Trainer and engine compute different models after a fresh start"),
        ("in place", "differs", "Loaded afresh, since a load in place is wrong"),
        ("in place", "refused", "Loaded in place with an error"),
    ):
        kinds = [row.cells[0] for row in rows if row.verdicts[column] == verdict]
        lines += ["", f"{meaning}: {len(kinds)}{': ' if kinds else ''}{', '.join(kinds)}."]
    total = f"{len(rows)} families, {dict(counts)}, {round(sum(seconds.values()))} s"
    return "\n".join(lines) + "\n", total


if __name__ == "__main__":
    head, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{PAGE} has no mark"
    text, total = build_page(Path(sys.argv[1]))
    PAGE.write_text(f"{head}{mark}\n{text}", encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {total}\n")
