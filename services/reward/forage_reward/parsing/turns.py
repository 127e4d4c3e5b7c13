"""The turns of a trajectory: the text of each generation, its action, and whether it is well formed."""

from __future__ import annotations

from itertools import groupby

from forage_reward.trajectory import Action, Role, TrajectoryView, Turn
from forage_runtime.text.tags import Tag, find_blocks

MAX_GENERATION = 1_000_000
"""Characters of a generation; a longer one is never well formed."""

_ACTIONS = {"search": Action.SEARCH, "kg-query": Action.SEARCH, "answer": Action.ANSWER}
"""Tags of the action blocks; `<kg-query>` is the search of agents on a knowledge graph."""

_UNIQUE_TAGS = ("think", *_ACTIONS)


class TurnMismatchError(ValueError):
    """The number of turns of a trajectory differs from that of its generations."""


def split_generations(view: TrajectoryView) -> list[str]:
    """Split a trajectory into the model's text of every turn, without end-of-turn markers.

    Raises:
        TurnMismatchError: the view has turns, but a different number of generations.
    """
    spans = [span.text for span in view.spans if span.role is Role.MODEL]
    texts = spans if view.turns and len(spans) == len(view.turns) else view.texts(Role.MODEL)
    if view.turns and len(texts) != len(view.turns):
        raise TurnMismatchError(
            f"{len(view.turns)} turns but {len(texts)} stretches of model text: send one span for each generation"
        )
    return [view.strip_end_of_turn(text) for text in texts]


def read_turns(view: TrajectoryView) -> tuple[Turn, ...]:
    """Return the turns of the view, or parse them from its spans: then a search counts as answered where the
    environment's next text contains an observation."""
    if view.turns:
        return view.turns
    runs = [(role, "".join(span.text for span in run)) for role, run in groupby(view.spans, key=lambda s: s.role)]
    turns = []
    for (role, text), (after, following) in zip(runs, [*runs, (None, "")][1:], strict=True):
        if role is Role.MODEL:
            action, content = parse_action(text)
            has_observation = after is Role.ENV and bool(find_blocks(following, Tag.INFORMATION))
            turns.append(Turn(action, content, action is Action.SEARCH and has_observation))
    return tuple(turns)


def parse_action(text: str) -> tuple[Action, str]:
    """Parse the first complete action block of a generation and its content, stripped; INVALID where there is none."""
    candidates = []
    for tag, action in _ACTIONS.items():
        begin = text.find(f"<{tag}>")
        end = text.find(f"</{tag}>", begin) if begin >= 0 else -1
        if end >= 0:  # otherwise no later opening tag has a closing tag either
            candidates.append((begin, end, tag, action))
    if not candidates:
        return Action.INVALID, ""
    begin, end, tag, action = min(candidates)
    return action, text[begin + len(f"<{tag}>") : end].strip()


def parse_strict_action(text: str) -> Action:
    """Parse a well-formed generation: `<think>…</think>`, white space, exactly one action block, and no tag of
    thoughts or actions twice. Anything else is INVALID.
    """
    if len(text) > MAX_GENERATION:
        return Action.INVALID
    body = text.strip()
    head, _, rest = body.partition("</think>")
    rest = rest.lstrip()
    for tag, action in _ACTIONS.items():
        if head.startswith("<think>") and rest.startswith(f"<{tag}>") and rest.endswith(f"</{tag}>"):
            expected = {name: int(name in ("think", tag)) for name in _UNIQUE_TAGS}
            is_unique = all(body.count(f"<{name}>") == body.count(f"</{name}>") == n for name, n in expected.items())
            return action if is_unique else Action.INVALID
    return Action.INVALID
