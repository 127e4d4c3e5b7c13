"""Evaluates the policy on questions, with a title look-up in place of a retriever.

`python -m forage_models.tiny_policy.evaluate --model models/tiny-policy --data data/world` logs the metrics before RL.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2ForCausalLM

from forage_models.tiny_policy.demonstrations import (
    LOOK,
    Role,
    Segment,
    build_prompt_segment,
    encode,
    format_feedback,
    format_information,
)
from forage_models.tiny_policy.facts import Document, Episode, World
from forage_models.tiny_policy.tokenizer import TURN_END

LOG = logging.getLogger("tiny_policy")
FORCED = f"<think> {LOOK}"
"""Beginning of the right mode; evaluation can force these tokens."""
MAX_SEARCHES = 3
MAX_NEW_TOKENS = 48
BATCH = 200
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_TURN = re.compile(r"<think>[^<]*</think>\s*<(search|answer)>[^<]*</\1>")


@dataclass(frozen=True)
class Metrics:
    """Means over questions. `query`: the first query is the first hop's title; `tokens`: generated per question."""

    em: float
    format: float
    query: float
    tokens: float
    length: float
    longest: int
    em_by_hops: dict[int, float]


@dataclass
class _Row:
    episode: Episode
    ids: list[int]
    generated: int = 0
    format: bool = True
    query: str | None = None
    answer: str | None = None
    done: bool = False


def evaluate_policy(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    episodes: Sequence[Episode],
    *,
    sample: bool,
    forced: bool = False,
    seed: int = 0,
) -> Metrics:
    """Run the loop (at most `MAX_SEARCHES` turns and a last one) on every episode, in batches."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    search = Search(world)
    rows = [_Row(e, encode(tokenizer, [build_prompt_segment(tokenizer, e.question)])) for e in episodes]
    if forced:
        for row in rows:
            row.ids += encode(tokenizer, [Segment(Role.MODEL, FORCED)])
    for turn in range(MAX_SEARCHES + 1):
        active = [row for row in rows if not row.done]
        if not active:
            break
        contexts = [row.ids for row in active]
        parts = [contexts[at : at + BATCH] for at in range(0, len(contexts), BATCH)]
        generated = [new for part in parts for new in generate_turns(model, tokenizer, part, sample)]
        for row, new in zip(active, generated, strict=True):
            row.ids += new
            row.generated += len(new)
            opening = FORCED if forced and turn == 0 else ""
            _apply_action(row, opening + tokenizer.decode(new), tokenizer, search, rng)
    return _compute_metrics(rows)


def measure_start(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, world: World, episodes: Sequence[Episode]
) -> dict[str, dict[str, Any]]:
    """Measure the policy before RL: greedy, sampled at temperature 1, and greedy with the right mode forced."""
    model.eval()
    found = {
        name: asdict(
            evaluate_policy(model, tokenizer, world, episodes, sample=name == "sampled", forced=name == "forced")
        )
        for name in ("greedy", "sampled", "forced")
    }
    model.train()
    return found


def is_exact_match(answer: str | None, targets: Sequence[str]) -> bool:
    """Whether an answer is right by the exact-match rule of the reward contract."""
    return answer is not None and _normalize(answer) in {_normalize(target) for target in targets}


def _normalize(text: str) -> str:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def _apply_action(row: _Row, text: str, tokenizer: PreTrainedTokenizerBase, search: Search, rng: random.Random) -> None:
    row.format = row.format and _TURN.fullmatch(text) is not None
    action = _ACTION.search(text)
    if action is None:
        row.ids += encode(tokenizer, [Segment(Role.ENV, format_feedback())])
    elif action[1] == "answer":
        row.answer, row.done = action[2].strip(), True
    else:
        row.query = row.query if row.query is not None else action[2].strip()
        row.ids += encode(tokenizer, [Segment(Role.ENV, format_information(search(action[2].strip(), rng)))])


class Search:
    """A stand-in for a retriever: the passage of that title, then one that shares a word with the query."""

    def __init__(self, world: World) -> None:
        """Index the corpus by the words of its passages."""
        self._titles = {title.lower(): document for title, document in world.documents.items()}
        self._words: dict[str, list[Document]] = {}
        for document in world.documents.values():
            for word in set(re.findall(r"\w+", f"{document.title} {document.text}".lower())):
                self._words.setdefault(word, []).append(document)

    def __call__(self, query: str, rng: random.Random) -> list[Document]:
        """At most two passages; none where the query's words occur nowhere."""
        exact = self._titles.get(query.lower())
        found = [exact] if exact else []
        words = [word for word in re.findall(r"\w+", query.lower()) if word in self._words]
        rarest = min(words, key=lambda word: len(self._words[word]), default=None)
        others = [d for d in self._words.get(rarest or "", []) if d is not exact]
        if others:
            found += rng.sample(others, min(2 - len(found), len(others)))
        return found


def generate_turns(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, contexts: list[list[int]], sample: bool
) -> list[list[int]]:
    """Generate one turn for each context: up to a stop string, an end token or `MAX_NEW_TOKENS`."""
    stops = [i for i in range(len(tokenizer)) if tokenizer.decode([i]).endswith(("</search>", "</answer>"))]
    stops.append(tokenizer.convert_tokens_to_ids(TURN_END))
    width = max(map(len, contexts))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(c)) + c for c in contexts])
    mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts])
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=sample,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=stops,
        pad_token_id=pad,
        **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}),
    )
    new = []
    for row in out[:, width:].tolist():
        end = next((n + 1 for n, token in enumerate(row) if token in stops), len(row))
        new.append(row[:end])
    return new


def _compute_metrics(rows: Sequence[_Row]) -> Metrics:
    right = [is_exact_match(row.answer, row.episode.targets) for row in rows]
    by_hops = {}
    for hops in sorted({len(row.episode.hops) for row in rows}):
        of = [ok for ok, row in zip(right, rows, strict=True) if len(row.episode.hops) == hops]
        by_hops[hops] = sum(of) / len(of)
    searched = [row for row in rows if row.query is not None]
    return Metrics(
        em=sum(right) / len(rows),
        format=sum(row.format and row.answer is not None for row in rows) / len(rows),
        query=sum(row.query == row.episode.hops[0].title for row in searched) / max(len(searched), 1),
        tokens=sum(row.generated for row in rows) / len(rows),
        length=sum(len(row.ids) for row in rows) / len(rows),
        longest=max(len(row.ids) for row in rows),
        em_by_hops=by_hops,
    )


def main() -> None:
    """Log a model's metrics on a split."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="test")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    world = World(args.data)
    model = Qwen2ForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for name, metrics in measure_start(model, tokenizer, world, world.read_episodes(args.split)).items():
        LOG.info("%s %s", name, json.dumps(metrics))


if __name__ == "__main__":
    main()
