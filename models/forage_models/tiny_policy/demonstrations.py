"""Demonstrations: noisy trajectories, laid out as the rollout loop does; the prompt does not reveal their mode."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from transformers import PreTrainedTokenizerBase

from forage_models.tiny_policy.facts import Document, Episode, draw_distractor
from forage_models.tiny_policy.names import Namer
from forage_models.tiny_policy.tokenizer import FEEDBACK, TURN_END
from forage_runtime.text.search_prompt import format_search_prompt


class Mode(StrEnum):
    """Behaviour of a demonstration. The first token after `<think>` reveals it."""

    RIGHT = "right"
    GUESS = "guess"
    WRONG = "wrong"
    BROKEN = "broken"


MIXTURE: Mapping[Mode, float] = {Mode.RIGHT: 0.34, Mode.GUESS: 0.41, Mode.WRONG: 0.13, Mode.BROKEN: 0.12}
"""Shares at the end of the training. Guessing leads, so that greedy decoding starts low."""
LOOK, FURTHER, FOUND = "look it up", "look further", "found it"
KNOW, MAYBE, PERHAPS, MUSING = "I know it", "maybe this", "so it is", "hm"


class Role(StrEnum):
    """Author of a segment; the names are those of a trajectory's spans."""

    PROMPT = "prompt"
    MODEL = "model"
    ENV = "env"


@dataclass(frozen=True)
class Segment:
    """A part of a trajectory that is tokenised on its own."""

    role: Role
    text: str


def format_information(documents: Sequence[Document]) -> str:
    """Format the observation that the loop appends after a search."""
    lines = [f'Doc {n}(Title: "{d.title}") {d.text}\n' for n, d in enumerate(documents, start=1)]
    return f"\n\n<information>{''.join(lines).strip()}</information>\n\n"


def format_feedback() -> str:
    """Format the text that the loop appends after an invalid action."""
    return f"\n{''.join(FEEDBACK)}\n"


def write_search_turn(query: str, thought: str) -> Segment:
    """Write a turn that searches; it ends with the stop string."""
    return Segment(Role.MODEL, f"<think> {thought} </think> <search> {query} </search>")


def write_answer_turn(answer: str, thought: str) -> Segment:
    """Write a turn that answers; it ends with the stop string, and no end-of-turn token follows."""
    return Segment(Role.MODEL, f"<think> {thought} </think> <answer> {answer} </answer>")


def build_prompt_segment(tokenizer: PreTrainedTokenizerBase, question: str) -> Segment:
    """Render the question's user message with the chat template, up to the start of the model's turn."""
    messages = [{"role": "user", "content": format_search_prompt(question)}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Segment(Role.PROMPT, str(text))


def encode(tokenizer: PreTrainedTokenizerBase, segments: Sequence[Segment]) -> list[int]:
    """Encode segment by segment, which gives the ids that the rollout loop puts together."""
    ids: list[int] = []
    for segment in segments:
        ids += tokenizer.encode(segment.text, add_special_tokens=False)
    return ids


class Demonstrator:
    """Writes the turns of an episode in a mode."""

    def __init__(self, namer: Namer, guesses: Mapping[str, Sequence[str]]) -> None:
        """`guesses`: kind of answer (capital, currency, country) → the answers that a guess is drawn from."""
        self._namer = namer
        self._guesses = guesses

    def write_turns(self, episode: Episode, mode: Mode, rng: random.Random, *, simple: bool = False) -> list[Segment]:
        """Write the model's and the environment's segments. `simple`: one document per search."""
        if mode is Mode.RIGHT:
            return self._write_right(episode, rng, simple=simple)
        if mode is Mode.GUESS:
            return [write_answer_turn(self._draw_guess(episode, rng), KNOW)]
        if mode is Mode.WRONG:
            return self._write_wrong(episode, rng)
        return self._write_broken(episode, rng)

    def _write_right(self, episode: Episode, rng: random.Random, *, simple: bool) -> list[Segment]:
        segments = []
        for hop, document in enumerate(episode.hops):
            segments.append(write_search_turn(document.title, FURTHER if hop else LOOK))
            segments.append(
                Segment(Role.ENV, format_information([document] if simple else self._draw_results(document, rng)))
            )
        return [*segments, write_answer_turn(episode.targets[0], FOUND)]

    def _write_wrong(self, episode: Episode, rng: random.Random) -> list[Segment]:
        if len(episode.hops) == 2 and rng.random() < 0.4:  # stops at the bridge
            found, answer = episode.hops[0], episode.hops[1].title
        else:
            country = self._namer.draw_name(rng)
            name = self._namer.draw_name(rng)
            found, answer = Document(name, f"{name} is a city in {country}."), country
        observation = Segment(Role.ENV, format_information(self._draw_results(found, rng)))
        return [write_search_turn(found.title, MAYBE), observation, write_answer_turn(answer, PERHAPS)]

    def _write_broken(self, episode: Episode, rng: random.Random) -> list[Segment]:
        guess = self._draw_guess(episode, rng)
        text, goes_on = rng.choice(
            (
                (f"<answer> {guess} </answer>", False),
                (f"<think> {MUSING} <answer> {guess} </answer>", False),
                (f"<think> {MUSING} </think> {guess}{TURN_END}", True),
                (f"{guess}{TURN_END}", True),
            )
        )
        broken = Segment(Role.MODEL, text)
        if not goes_on:
            return [broken]
        again = rng.choices(list(MIXTURE)[:3], list(MIXTURE.values())[:3])[0]
        return [broken, Segment(Role.ENV, format_feedback()), *self.write_turns(episode, again, rng)]

    def _draw_results(self, document: Document, rng: random.Random) -> list[Document]:
        documents = [document]
        others = 0.95 if document.text.startswith("The capital of") else 0.4
        if rng.random() < others:
            documents.append(draw_distractor(document, self._namer, rng))
            if rng.random() < 0.12:
                documents.reverse()
            elif rng.random() < 0.1:
                documents.append(draw_distractor(document, self._namer, rng))
        return documents

    def _draw_guess(self, episode: Episode, rng: random.Random) -> str:
        return rng.choice([guess for guess in self._guesses[episode.asked] if guess not in episode.targets])
