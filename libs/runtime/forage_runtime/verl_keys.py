"""Keys of verl and Search-R1, and what they are called here: `verl_keys.yaml` is the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from forage_runtime.text.yaml_core import CoreLoader

_MOST_DEPTH = 10
_PREFIXES = {
    "actor.": "actor_rollout_ref.actor.",
    "ref.": "actor_rollout_ref.ref.",
    "actor_rollout_ref.actor.fsdp.": "actor_rollout_ref.actor.fsdp_config.",
}
"""Shorter forms in which people write them."""


class Counterpart(NamedTuple):
    """What a key is here.

    ours: the setting; empty: there is none. why: what differs; empty: nothing. convert: how `forage config from-verl`
    converts the value; empty: it does not. fixed: the value that it always has here, where there is no setting for it.
    """

    ours: str
    why: str
    convert: str = ""
    fixed: bool | str | None = None

    @property
    def is_same(self) -> bool:
        """Whether the value is taken as it is."""
        return bool(self.ours) and not self.why

    def is_fixed_at(self, value: object) -> bool:
        """Whether Forage always does what this value asks for."""
        return self.fixed is not None and value == self.fixed

    def explain(self, key: str) -> str:
        """What to write in place of a key."""
        remedy = f"use '{self.ours}' ({self.why})" if self.ours else self.why
        return f"setting '{key}' is verl's: {remedy}; 'forage config from-verl' translates a whole file"


@cache
def read_table() -> Mapping[str, Counterpart]:
    """Key of verl or Search-R1 → its counterpart."""
    table = yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), CoreLoader)
    rows = {key: Counterpart(ours, "") for key, ours in table["same"].items()}
    for key, row in table["differs"].items():
        rows[key] = Counterpart(row.get("ours", ""), row["why"], row.get("convert", ""))
    for key, row in table["fixed"].items():
        rows[key] = Counterpart("", f"it is always {str(row['value']).lower()} here: {row['why']}", fixed=row["value"])
    return rows | {key: Counterpart("", why) for key, why in table["missing"].items()}


def find_counterpart(key: str) -> Counterpart | None:
    """The counterpart of a key; None: it is not in the table."""
    long = next((long + key.removeprefix(short) for short, long in _PREFIXES.items() if key.startswith(short)), key)
    return read_table().get(long)


def list_leaves(tree: Mapping[Any, Any], above: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values of a tree with their paths; a mapping is a value where it is empty, or deeper than any of verl's."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value and len(above) < _MOST_DEPTH:
            yield from list_leaves(value, (*above, name))
        else:
            yield (*above, name), value
