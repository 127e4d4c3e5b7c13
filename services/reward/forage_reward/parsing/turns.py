"""A trajectory turn by turn: what each generation says, what it asked for, and whether it is well formed."""

from __future__ import annotations

from itertools import groupby

from forage_common.text.tags import Tag, find_blocks
from forage_reward.trajectory import Action, Role, TrajectoryView, Turn

MAX_GENERATION = 1_000_000
"""Characters; a longer generation has no format, whatever it says."""

_ACTIONS = {"search": Action.SEARCH, "kg-query": Action.SEARCH, "answer": Action.ANSWER}
"""Tags of the action blocks; `<kg-query>` is what agents on a knowledge graph write for a search."""

_ONCE = ("think", *_ACTIONS)


class TurnMismatchError(ValueError):
    """The turns that came with a trajectory are not those of its generations."""


def generations(view: TrajectoryView) -> list[str]:
    """The model's text of every turn, without an end-of-turn marker.

    Raises:
        TurnMismatchError: the view has turns, but another number of generations.
    """
    spans = [span.text for span in view.spans if span.role is Role.MODEL]
    texts = spans if view.turns and len(spans) == len(view.turns) else view.texts(Role.MODEL)
    if view.turns and len(texts) != len(view.turns):
        raise TurnMismatchError(
            f"{len(view.turns)} turns but {len(texts)} stretches of model text: send one span for each generation"
        )
    return [view.without_end_of_turn(text) for text in texts]


def turns_of(view: TrajectoryView) -> tuple[Turn, ...]:
    """The view's own turns, or, where it has none, what its spans say: a search counts as answered where the
    environment's next text holds an observation."""
    if view.turns:
        return view.turns
    runs = [(role, "".join(span.text for span in run)) for role, run in groupby(view.spans, key=lambda s: s.role)]
    turns = []
    for (role, text), (after, following) in zip(runs, [*runs, (None, "")][1:], strict=True):
        if role is Role.MODEL:
            action, content = asked(text)
            seen = after is Role.ENV and bool(find_blocks(following, Tag.INFORMATION))
            turns.append(Turn(action, content, action is Action.SEARCH and seen))
    return tuple(turns)


def asked(text: str) -> tuple[Action, str]:
    """The first complete action block of a generation and its content, stripped; INVALID where there is none."""
    found = []
    for tag, action in _ACTIONS.items():
        begin = text.find(f"<{tag}>")
        end = text.find(f"</{tag}>", begin) if begin >= 0 else -1
        if end >= 0:  # else no later opener has a closer either
            found.append((begin, end, tag, action))
    if not found:
        return Action.INVALID, ""
    begin, end, tag, action = min(found)
    return action, text[begin + len(f"<{tag}>") : end].strip()


def formatted_action(text: str) -> Action:
    """What a well-formed generation does: `<think>…</think>`, blank, exactly one action block, and no tag of
    thoughts or actions twice. Anything else is INVALID.
    """
    if len(text) > MAX_GENERATION:
        return Action.INVALID
    body = text.strip()
    head, _, rest = body.partition("</think>")
    rest = rest.lstrip()
    for tag, action in _ACTIONS.items():
        if head.startswith("<think>") and rest.startswith(f"<{tag}>") and rest.endswith(f"</{tag}>"):
            wanted = {name: int(name in ("think", tag)) for name in _ONCE}
            once = all(body.count(f"<{name}>") == body.count(f"</{name}>") == n for name, n in wanted.items())
            return action if once else Action.INVALID
    return Action.INVALID
