"""Whether a model keeps packed rows apart: measured at the start through the model that trains, not listed by family.

Two short rows are computed packed, alone and padded. What a row's outputs differ by is compared with what the type of
the passes rounds away. The second row is longer than the model's window of attention where that can matter, so that an
attention which lacks the window is found as one that lacks another term is. Whether rows may be packed as a tree, in
which a prefix of both is once, is measured in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from forage_trainer.data.tensors import make_jagged
from forage_trainer.engine.layout import Layout, TreeLayout

Compute = Callable[[Sequence[torch.Tensor], bool, int], torch.Tensor]
"""Rows, whether they are packed, and the number of a row → its outputs at `choose_places`, (tokens, width)."""
_FIRST, _SECOND, _EDGE = 57, 42, 24
_WINDOWS = ("attention_chunk_size", "sliding_window")
"""Fields of configurations that bound how far a token attends."""
_NOISE = 4
"""How many times the difference that padded rows show among each other packed rows may show."""
_LEAST = 1e-5


@dataclass(frozen=True)
class PackedDifferences:
    """How far outputs of the second row are from each other, in standard deviations of all: the worst token's mean.

    attention: of the row packed alone from the row padded.
    place: of the row behind the first from the row packed alone.
    neighbour: of the row behind the first from the row behind another first row.
    noise: of the row padded beside the first from the row beside another first row: 0 but for layers of experts.
    """

    attention: float
    place: float
    neighbour: float
    noise: float

    def find_problem(self, dtype: torch.dtype) -> str | None:
        """Say what rounding to the type of the passes does not explain, and by how much; None: nothing."""
        eps = torch.finfo(dtype).eps
        # Sums in another order differ in up to half of the digits; the same sums in none.
        order, same = math.sqrt(eps), max(eps, _LEAST, _NOISE * self.noise)
        for difference, bound, what in (
            (self.neighbour, same, "a packed row depends on the row before it"),
            (self.attention, order, "the attention of packed rows is not the model's"),
            (self.place, order, "a packed row depends on its place"),
        ):
            if not difference <= bound:
                return f"{what}: off by {difference:.2g} standard deviations, rounding explains {bound:.1g}"
        return None


def measure_packing(compute: Compute, rows: Sequence[torch.Tensor]) -> PackedDifferences:
    """Compare a row packed, alone and padded.

    Args:
        rows: as of `draw_rows`.
    """
    first, other, second = rows
    alone, behind, behind_other = (
        compute(packed, True, len(packed) - 1) for packed in ([second], [first, second], [other, second])
    )
    padded, beside_other = compute([second, first], False, 0), compute([second, other], False, 0)
    return PackedDifferences(
        attention=_compare(alone, padded),
        place=_compare(behind, alone),
        neighbour=_compare(behind, behind_other),
        noise=_compare(padded, beside_other),
    )


def draw_rows(config: Any, budget: int, device: torch.device) -> list[torch.Tensor]:
    """Draw the first row, another one of its length, and the second row.

    Args:
        config: transformers' configuration of the model.
        budget: most tokens of a micro-batch: no row is longer.
    """
    text = config.get_text_config()
    windows = [window for name in _WINDOWS if isinstance(window := getattr(text, name, None), int)]
    limits = [budget, getattr(text, "max_position_embeddings", None) or budget]
    length = max((window + _EDGE for window in windows if window + _EDGE <= min(limits)), default=_SECOND)
    draw = torch.Generator().manual_seed(47)
    sizes = (_FIRST, _FIRST, max(length, _SECOND))
    return [torch.randint(text.vocab_size, (size,), generator=draw).to(device) for size in sizes]


def draw_forked_rows(config: Any, budget: int, device: torch.device) -> list[torch.Tensor]:
    """Draw three rows as `draw_rows` does, of equal lengths and with the same tokens before their last ones.

    A tree holds rows in the order of their tokens: the second row is the last one of them.
    """
    rows = draw_rows(config, budget, device)
    prefix = rows[-1][:-_EDGE]
    fork = torch.zeros(1, dtype=torch.long, device=device)
    return [torch.cat([prefix, fork + int(row is rows[-1]), row[-_EDGE + 1 :]]) for row in rows]


def choose_places(row: torch.Tensor) -> torch.Tensor:
    """Choose the tokens whose outputs are compared: those at the row's begin and end."""
    places = torch.arange(len(row), device=row.device)
    return places if len(row) <= 2 * _EDGE else torch.cat([places[:_EDGE], places[-_EDGE:]])


def build_probe(rows: Sequence[torch.Tensor], packed: bool, which: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Build the model's inputs of rows, and the columns of them that hold the chosen tokens of row `which`."""
    parts = {"prompts": [row[:1] for row in rows], "responses": [row[1:] for row in rows]}
    layout = Layout.of({name: make_jagged(part) for name, part in parts.items()}, packed)
    places = choose_places(rows[which])
    return layout.build_inputs(make_jagged(rows)), places + int(layout.offsets[which]) if packed else places


def build_tree_probe(rows: Sequence[torch.Tensor], packed: bool, which: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Build the same, of rows that are packed as a tree."""
    if not packed:
        return build_probe(rows, False, which)
    parts = {"prompts": [row[:1] for row in rows], "responses": [row[1:] for row in rows]}
    layout = TreeLayout.of_tree({name: make_jagged(part) for name, part in parts.items()})
    places = choose_places(rows[which]) + int(layout.offsets[which])
    return layout.build_inputs(make_jagged(rows)), torch.from_numpy(layout.tree.places)[places]


def agree(differences: PackedDifferences, device: torch.device) -> PackedDifferences:
    """Take the largest differences of all processes, so that all of them decide alike; noise too."""
    every = torch.tensor(astuple(differences), device=device)
    torch.distributed.all_reduce(every, torch.distributed.ReduceOp.MAX)
    return PackedDifferences(*every.tolist())


def _compare(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest root mean square, over the width, of a token's differences, in standard deviations of all outputs."""
    apart = (one - other).square().mean(-1).sqrt().max()
    return float(apart / other.std().clamp_min(torch.finfo(other.dtype).tiny))
