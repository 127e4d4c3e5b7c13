"""Trees of rows with shared prefixes, their cuts and their attention, against independent computations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
import torch
from random_model import build_random_model
from trees import draw_tree

from forage_trainer.data.prefix_tree import Ids, build_tree, count_tokens, cut_trees
from forage_trainer.data.tensors import make_jagged
from forage_trainer.engine.attention import PREFIX_TREE, TreeAttention, attend_along_tree, register_attentions
from forage_trainer.engine.cpu_engine import split_cuts
from forage_trainer.engine.layout import TreeLayout

register_attentions()
SEEDS = range(60)
HEADS, GROUPS, WIDTH = 4, 2, 8
NUMBERS = {"no shared token": [[1, 2], [2, 2], [3]], "one row": [[5, 6, 7]], "equal rows": [[4, 4]] * 3}
CASES = {**NUMBERS, "a row that begins another": [[1, 2, 3], [1, 2], [1, 2, 4, 5], [1]]}


def to_rows(numbers: Sequence[Sequence[int]]) -> list[Ids]:
    return [np.array(row, np.int64) for row in numbers]


def list_prefixes(rows: Sequence[Ids]) -> list[tuple[int, ...]]:
    """Of each token of the rows in order, the tokens up to it."""
    return [tuple(row[: end + 1]) for row in map(np.ndarray.tolist, rows) for end in range(len(row))]


def draw(seed: int) -> list[Ids]:
    return draw_tree(random.Random(seed))


@pytest.mark.parametrize("rows", [*map(draw, SEEDS), *map(to_rows, CASES.values())])
def test_a_tree_has_each_prefix_once_and_every_token_behind_its_own(rows: list[Ids]) -> None:
    tree, prefixes = build_tree(rows), list_prefixes(rows)
    assert len(tree.firsts) == len(set(prefixes)) == sum(tree.pieces) == count_tokens(rows)
    assert [prefixes[token] for token in tree.firsts[tree.places]] == prefixes
    assert sum(tail.size for tail in tree.tails) == len(tree.firsts)
    held = [prefixes[token] for token in tree.firsts]
    ends = list(accumulate(tree.pieces, initial=0))
    last = 0
    for tail in tree.tails:
        path = [prefix for piece in tail.path for prefix in held[ends[piece] : ends[piece + 1]]]
        assert path == [path[-1][: end + 1] for end in range(len(path))], "a row from its first token to its last"
        assert path[-tail.size :] == held[last : last + tail.size]
        last += tail.size


@pytest.mark.parametrize("seed", SEEDS)
def test_a_group_is_cut_only_where_it_is_too_large(seed: int) -> None:
    chance = random.Random(seed)
    groups = [[[number, *row] for row in draw_tree(chance)] for number in range(chance.randint(1, 5))]
    rows = to_rows([row for group in groups for row in group])
    order = chance.sample(range(len(rows)), len(rows))
    shuffled, owners = [rows[row] for row in order], [rows[row][0] for row in order]
    longest = max(map(len, rows))
    limit = longest + chance.randint(0, 100)
    target = chance.randint(1, limit)
    at_least = chance.randint(1, len(rows))
    cuts = split_cuts(cut_trees(shuffled, [1] * len(rows), target, limit), at_least)
    assert sorted(row for cut in cuts for row in cut) == list(range(len(rows)))
    assert len(cuts) >= at_least
    assert all(cuts)
    for cut in cuts:
        tokens = count_tokens([shuffled[row] for row in cut])
        assert tokens <= limit or len(cut) == 1
        assert tokens <= target or len({owners[row] for row in cut}) == 1
    for number in range(len(groups)):
        own = [shuffled[row] for row, owner in enumerate(owners) if owner == number]
        parts = [
            cut for cut in cut_trees(shuffled, [1] * len(rows), target, limit) if number in {owners[r] for r in cut}
        ]
        fits = count_tokens(own) <= min(limit, target)
        assert not fits or len(parts) == 1


def test_a_long_prompt_is_not_computed_twice_for_its_group() -> None:
    """Its tree may exceed the target, which bounds what is predicted."""
    rows = to_rows([[0] * 100 + [1 + row] * 10 for row in range(8)])
    assert cut_trees(rows, [100] * 8, 80, 1000) == [list(range(8))]
    assert [len(cut) for cut in cut_trees(rows, [100] * 8, 79, 1000)] == [7, 1]
    assert [len(cut) for cut in cut_trees(rows, [100] * 8, 80, 130)] == [3, 3, 2]


def attend_plainly(
    parts: Sequence[torch.Tensor], prefixes: Sequence[tuple[int, ...]], window: int | None
) -> torch.Tensor:
    """One softmax over all pairs of tokens; those of which one does not begin the other's prefix are left out."""
    query, key, value = (part[0] for part in parts)
    key, value = (part.repeat_interleave(HEADS // GROUPS, 0) for part in (key, value))
    seen = torch.tensor([[own[: len(other)] == other for other in prefixes] for own in prefixes])
    if window is not None:
        length = torch.tensor([len(prefix) for prefix in prefixes])
        seen &= length[:, None] - length < window
    scores = (query @ key.transpose(1, 2) * 0.3).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)[None]


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize("rows", [*map(draw, range(12)), *map(to_rows, CASES.values())])
def test_attention_is_that_of_one_softmax_over_each_token_and_those_before_it(
    rows: list[Ids], window: int | None
) -> None:
    tree, prefixes = build_tree(rows), list_prefixes(rows)
    torch.manual_seed(len(prefixes))
    shapes = [(1, heads, len(tree.firsts), WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    parts = [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in shapes]
    arguments = {"scaling": 0.3, "sliding_window": window, "prefix_tree": TreeAttention(tree)}
    result, _ = attend_along_tree(torch.nn.Identity(), *parts, None, **arguments)
    expected = attend_plainly(parts, [prefixes[token] for token in tree.firsts], window)
    torch.testing.assert_close(result, expected)
    weights = torch.randn_like(result)
    for one, other in zip(
        torch.autograd.grad((result * weights).sum(), parts),
        torch.autograd.grad((expected * weights).sum(), parts),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"softcap": 30.0}, "has softcap"),
        ({"s_aux": torch.zeros(HEADS)}, "has s_aux"),
        ({"dropout": 0.1}, "has dropout"),
        ({"prefix_tree": None}, "needs the tree"),
    ],
)
def test_what_it_cannot_compute_is_refused(more: dict[str, object], named: str) -> None:
    tree = build_tree(to_rows([[1, 2], [1, 3]]))
    parts = [torch.zeros(1, HEADS, 3, WIDTH)] * 3
    with pytest.raises(ValueError, match=named):
        attend_along_tree(torch.nn.Identity(), *parts, None, **({"prefix_tree": TreeAttention(tree)} | more))


@pytest.mark.parametrize("with_temperatures", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_gets_what_was_computed_for_its_token_and_the_next(seed: int, with_temperatures: bool) -> None:
    """A made model whose output names the token, those before it, the one that it predicts and the temperature."""
    chance = random.Random(seed)
    rows = [np.insert(row, 0, 0) for row in draw(seed)]
    prompts = [chance.randint(1, len(row) - 1) for row in rows]
    temperatures = torch.tensor([chance.choice([0.5, 1.0]) for _ in rows])
    micro = {
        "prompts": make_jagged([torch.from_numpy(row[:size]) for row, size in zip(rows, prompts, strict=True)]),
        "responses": make_jagged([torch.from_numpy(row[size:]) for row, size in zip(rows, prompts, strict=True)]),
    }
    if with_temperatures:
        micro["temperature"] = temperatures
    layout = TreeLayout.of_tree(micro)
    inputs = layout.build_inputs(make_jagged([torch.from_numpy(row) for row in rows]))
    prefixes = list_prefixes(rows)
    held = [prefixes[token] for token in layout.tree.firsts]
    assert inputs["input_ids"][0].tolist() == [prefix[-1] for prefix in held]
    assert inputs["position_ids"][0].tolist() == [len(prefix) - 1 for prefix in held]
    kept, chosen = layout.choose()
    assert isinstance(kept, torch.Tensor)
    assert chosen is None
    labels, each = layout.ask(micro["responses"].values()).tolist(), layout.ask(temperatures[layout.rows]).tolist()
    names = [(held[place], label, each[number]) for number, (place, label) in enumerate(zip(kept, labels, strict=True))]
    if not with_temperatures:
        names = [(*name[:2], 0) for name in names]
    assert len(set(names)) == len(names), "nothing is computed twice"
    with torch.enable_grad():
        numbered = torch.arange(1.0, len(names) + 1, requires_grad=True)
        spread = layout.spread(numbered)
    expected: list[object] = []
    for row, prompt, temperature in zip(rows, prompts, temperatures.tolist(), strict=True):
        tokens = row.tolist()
        for end in range(1, len(tokens) + 1):
            is_asked = prompt <= end < len(tokens)
            key = temperature if with_temperatures else 0
            expected.append((tuple(tokens[:end]), tokens[end], key) if is_asked else None)
    assert [names[int(value) - 1] if value else None for value in spread.tolist()] == expected
    (gradient,) = torch.autograd.grad(spread.sum(), numbered)
    assert gradient.tolist() == [expected.count(name) for name in names]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("seed", range(4))
def test_a_model_computes_the_same_of_a_tree_as_of_each_row_alone(window: int | None, seed: int) -> None:
    """In fp64, by a model without parts that stay in fp32: outputs of every token, gradients of all parameters."""
    rows = [torch.from_numpy(row) for row in draw(seed)]
    sizes = {"num_key_value_heads": 1, "sliding_window": window, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    model = build_random_model("starcoder2", seed, vocab_size=5, **sizes).double()
    parts = {"prompts": make_jagged([row[:1] for row in rows]), "responses": make_jagged([row[1:] for row in rows])}
    layout, ids = TreeLayout.of_tree(parts), make_jagged(rows)

    def compute(whole: bool) -> list[torch.Tensor]:
        model.set_attn_implementation("sdpa" if whole else PREFIX_TREE)
        if whole:
            logits = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])
        else:
            logits = layout.collect(model(**layout.build_inputs(ids), use_cache=False).logits)
        weights = torch.randn(logits.shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
        loss = (logits.log_softmax(-1) * weights).sum()
        return [logits, *torch.autograd.grad(loss, [one for one in model.parameters() if one.requires_grad])]

    for one, other in zip(compute(False), compute(True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
