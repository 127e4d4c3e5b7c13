"""Writes docs/reference/templates.md: what the chat templates of a folder do. usage: templates.py FOLDER VERSION"""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from forage_runtime.text.chat_template import ChatTemplate, TemplateError
from forage_trainer.chats.template_facts import Fact, Level, TemplateProbe

PAGE = Path(__file__).parents[1] / "docs/reference/templates.md"
TODAY = date(2026, 11, 28)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


class Tokenizer:
    """The part of a tokenizer that renders."""

    def __init__(self, text: str) -> None:
        self.chat_template = text

    def apply_chat_template(self, chat: list[dict[str, str]], tokenize: bool, **options: Any) -> str:
        assert not tokenize
        texts, _ = render_jinja_template([chat], chat_template=self.chat_template, **SPECIAL, **options)
        return str(texts[0])


def describe(facts: dict[str, Fact]) -> list[str]:
    """The cells of a template's row."""
    opening = facts["opening"]
    if "begins the policy's turn with '" in opening.seen:
        shown = "`" + opening.seen.partition("turn with '")[2].removesuffix("'") + "`"
    else:
        shown = "closed thought" if opening.level is Level.NOTE else ""
    thinking = facts["thinking"].seen
    notes = {name for name, fact in facts.items() if fact.level is Level.NOTE}
    return [
        shown,
        "never" if "format" in facts else "",
        "no" if "chats" in notes else "",
        "dropped" if "earlier thoughts" in notes else "",
        "stripped" if "white space" in notes else "",
        "yes" if "date" in notes else "",
        thinking.partition(" changes")[0] if " changes" in thinking else "",
        *(say(facts[name]) for name in ("system message", "two user messages in a row", "tool message")),
        "yes" if "has generation" in facts["masks"].seen else "",
    ]


def say(fact: Fact) -> str:
    """A role's cell: empty where it is taken."""
    return "" if fact.level is Level.FINE else "dropped" if "dropped" in fact.seen else "refused"


def main(folder: Path, package: str) -> None:
    rows, refused = [], []
    for file in sorted(folder.glob("*.jinja")):
        try:
            facts = TemplateProbe(ChatTemplate(Tokenizer(file.read_text(encoding="utf-8"))), {}, TODAY).list_facts()
        except TemplateError as error:
            refused.append(f"{file.stem} ({error})")
            continue
        rows.append([file.stem, *describe({fact.topic: fact for fact in facts})])
    columns = [
        "template", "begins the turn with", "format", "chat keeps its tokens", "earlier thoughts", "white space",
        "date", "changes the prompt", "system", "two of the user", "tool", "generation markers",
    ]  # fmt: skip
    made = datetime.now(UTC).date()
    counts = [sum(bool(row[place]) for row in rows) for place in range(1, len(columns))]
    total = ["**templates with it**", *map(str, counts)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [*rows, total]]
    text = PAGE.read_text(encoding="utf-8")
    head, mark, _ = text.partition("<!-- made by lab/templates.sh -->\n")
    assert mark, f"{PAGE} has no mark"
    source = (
        f"Made on {made} with transformers {version('transformers')} from the {len(rows) + len(refused)} templates in"
        f" the source package of llama-cpp-python {package} (`vendor/llama.cpp/models/templates`; each template is its"
        " model's). An empty cell is what a trainer would expect."
    )
    tail = f"\nNot rendered without tools: {'; '.join(refused)}.\n" if refused else ""
    PAGE.write_text(head + mark + f"\n{source}\n\n" + "\n".join(lines) + "\n" + tail, encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {len(rows)} templates, {dict(zip(columns[1:], counts, strict=True))}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
