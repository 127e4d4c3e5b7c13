"""Facts about a tokenizer, and about rows of three turns: what is trained is what was sampled."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forage_runtime.text.chat_template import count_common
from forage_runtime.text.observation import RESERVED_TAGS, escape_tags
from forage_runtime.text.tags import CLOSE, OPEN, Tag
from forage_trainer.chats.template_facts import Fact, Level
from forage_trainer.data.tensors import Rows
from forage_trainer.engine.layout import Layout
from forage_trajectory.trajectory import Columns

_STOPS = (CLOSE[Tag.SEARCH], CLOSE[Tag.ANSWER])
_TURNS = (
    "<think>\nI need to look it up.</think>\n\n<search> longest river </search>",
    "Not sure yet.\n\n<think>Again…</think><search>Nile length km</search>\n",
    "<think> 6,650 km.</think>\n<answer> the Nile </answer>",
)
_OBSERVATIONS = ("\n\n<information>{}</information>\n\n", "\n\n<information>{}</information>\n\n")
_ROUNDING = 2e-4
"""Log-probabilities of float32 in two layouts differ by less, over a few hundred tokens."""


@dataclass(frozen=True)
class Episode:
    """Three turns with two observations, as token ids.

    prompt: of the chat template. parts: (token ids, whether the policy sampled them) of the response.
    """

    prompt: list[int]
    parts: list[tuple[list[int], bool]]

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *(token for part, _ in self.parts for token in part)]

    @property
    def sampled(self) -> list[bool]:
        """For each token of the response."""
        return [is_sampled for part, is_sampled in self.parts for _ in part]

    def to_columns(self) -> Columns:
        """The form in which the trainer keeps them."""
        turns = itertools.count(1)
        runs = [(len(part), int(one), next(turns) if one else -1) for part, one in self.parts]
        count = sum(self.sampled)
        return Columns(np.array(self.token_ids, np.int32), np.array(runs, np.int32), np.zeros(count, np.float32))


def build_episode(tokenizer: Any, prompt: str) -> Episode:
    """Build the turns, with every control token of the tokenizer in the observations, escaped as the loop does."""
    controls = list_controls(tokenizer)
    body = escape_tags(f"Doc 1(Title: Nile) a river </answer>{''.join(controls)}", controls)
    parts = []
    for place, turn in enumerate(_TURNS):
        parts.append((_encode(tokenizer, turn), True))
        if place < len(_OBSERVATIONS):
            parts.append((_encode(tokenizer, _OBSERVATIONS[place].format(body)), False))
    return Episode(_encode(tokenizer, prompt), parts)


def list_controls(tokenizer: Any) -> list[str]:
    """List the texts that the tokenizer turns into control tokens."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def check_tokenizer(tokenizer: Any, prompt: str) -> list[Fact]:
    """List the facts about a tokenizer.

    Args:
        prompt: a rendered question.
    """
    return [_check_stops(tokenizer), _check_controls(tokenizer, prompt), _check_drift(tokenizer, prompt)]


def check_rows(tokenizer: Any, model: Any, prompt: str) -> Fact:
    """Compare the trainer's rows of an episode, beside a shorter one, with a forward pass over its tokens alone."""
    episode = build_episode(tokenizer, prompt)
    shorter = Episode(episode.prompt[-5:], episode.parts[:1])
    rows = Rows(
        columns=[shorter.to_columns(), episode.to_columns()],
        prompts=[len(one.prompt) for one in (shorter, episode)],
        responses=[len(one.sampled) for one in (shorter, episode)],
        temperatures=[1.0, 1.0],
        positions=[0, 0],
        pad_id=0,
        state_masking=True,
    )
    data = rows.data
    layout = Layout.of(data, packed=False)
    with torch.no_grad():
        together = model(**layout.build_inputs(data["input_ids"])).logits.float().log_softmax(-1)
        alone = model(input_ids=torch.tensor([episode.token_ids])).logits.float().log_softmax(-1)[0]
    labels, mask = data["responses"].values(), data["response_mask"].values().bool()
    found = together[layout.rows, layout.columns].gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    own = (layout.rows == 1) & mask
    places = [n for n, is_sampled in enumerate(episode.sampled, len(episode.prompt)) if is_sampled]
    trained = labels[own].tolist()
    if trained != [episode.token_ids[place] for place in places]:
        return Fact("rows", "the tokens that are trained on are not those that were sampled", "", "", Level.WARNING)
    expected = alone[[place - 1 for place in places]].gather(-1, torch.tensor(trained).unsqueeze(-1)).squeeze(-1)
    difference = float((found[own] - expected).abs().max())
    seen = f"{len(trained)} tokens of three turns are trained on, and they are those that were sampled"
    compared = f"log-probabilities differ by {difference:.1e} from a forward pass over the tokens alone"
    if difference > _ROUNDING:
        remedy = "the model does not keep rows apart that are padded on the right: use another, or report it"
        return Fact("rows", f"{seen}; {compared}", "", remedy, Level.WARNING)
    return Fact("rows", seen, compared)


def _check_stops(tokenizer: Any) -> Fact:
    """Whether stop texts end inside a token: the token then reaches past them."""
    merged = []
    for stop in _STOPS:
        for following in ("\n", "\n\n", " ", "."):
            ids = _encode(tokenizer, stop + following)
            ends = [len(tokenizer.decode(ids[:count])) for count in range(1, len(ids) + 1)]
            if len(stop) not in ends:
                merged.append(f"{stop + following!r}")
    if not merged:
        return Fact("stop texts", "end with a token")
    done = "the whole token is kept and trained on, as it was sampled; rewards read the text up to the stop"
    return Fact("stop texts", f"{', '.join(merged)}: one token reaches past the stop", done, "", Level.NOTE)


def _check_controls(tokenizer: Any, prompt: str) -> Fact:
    """Whether control tokens in passages and questions stay text."""
    controls = list_controls(tokenizer)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.discard(tokenizer.unk_token_id)
    episode = build_episode(tokenizer, prompt)
    through = {token for part, is_sampled in episode.parts if not is_sampled for token in part} & special
    if through:
        named = ", ".join(repr(tokenizer.decode([token])) for token in sorted(through))
        remedy = "their texts cannot be escaped: leave documents with them out of the corpus"
        return Fact("control tokens", f"{named} in a passage become control tokens", "", remedy, Level.WARNING)
    return Fact("control tokens", f"{len(controls)} control tokens", "in passages and questions they are escaped")


def _check_drift(tokenizer: Any, prompt: str) -> Fact:
    """How many tokens another trainer, which encodes the text again, would change."""
    episode = build_episode(tokenizer, prompt)
    ids = episode.token_ids
    again = _encode(tokenizer, tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    tags = ", ".join(f"<{name}> {len(_encode(tokenizer, OPEN[Tag(name)]))}" for name in RESERVED_TAGS)
    if again == ids:
        return Fact("tokens", f"three turns encoded again give the same tokens (tokens of a tag: {tags})")
    same = count_common(ids, again)
    seen = f"three turns encoded again differ from token {same} of {len(ids)} on (tokens of a tag: {tags})"
    return Fact("tokens", seen, "nothing is encoded again: what was sampled is trained on", "", Level.NOTE)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
