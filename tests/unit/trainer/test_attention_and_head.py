"""Attention within rows and the chunked output layer, against independent computations."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from random_model import build_random_model
from transformers import Qwen2ForCausalLM

from forage_trainer.engine import head as head_module
from forage_trainer.engine.attention import attend_within_rows, build_row_arguments
from forage_trainer.engine.head import FusedHead, HeadQuery, find_obstacle, score_logits

LENGTHS = [1, 7, 33, 1, 2, 20]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
HEADS, GROUPS, WIDTH = 6, 2, 8


def draw_packed(seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    shapes = [(1, heads, sum(LENGTHS), WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in shapes]


def attend(parts: list[torch.Tensor], window: int | None = None) -> torch.Tensor:
    rows = build_row_arguments(OFFSETS)
    return attend_within_rows(torch.nn.Identity(), *parts, None, scaling=0.3, sliding_window=window, **rows)[0]


def attend_plainly(parts: list[torch.Tensor], window: int | None = None) -> torch.Tensor:
    """One softmax over all pairs of tokens, those of two rows and of later tokens left out."""
    query, key, value = (part[0] for part in parts)
    key, value = (part.repeat_interleave(HEADS // GROUPS, 0) for part in (key, value))
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(len(row))
    seen = (row[:, None] == row) & (place[:, None] >= place)
    if window is not None:
        seen &= place[:, None] - place < window
    scores = (query @ key.transpose(1, 2) * 0.3).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)[None]


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_attention_is_that_of_one_softmax_within_each_row(window: int | None) -> None:
    parts = draw_packed()
    result, expected = attend(parts, window), attend_plainly(parts, window)
    torch.testing.assert_close(result, expected)
    weights = torch.randn_like(result)
    for one, other in zip(
        torch.autograd.grad((result * weights).sum(), parts),
        torch.autograd.grad((expected * weights).sum(), parts),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_what_is_in_one_row_reaches_no_other() -> None:
    parts = draw_packed()
    before, changed = attend(parts), slice(int(OFFSETS[2]), int(OFFSETS[3]))
    others = [part.detach().clone() for part in parts]
    for part in others:
        part[:, :, changed] = 1e3 * torch.randn_like(part[:, :, changed])
    after = attend(others)
    outside = torch.ones(sum(LENGTHS), dtype=torch.bool)
    outside[changed] = False
    assert torch.equal(after[:, outside], before[:, outside])
    assert not torch.allclose(after[:, changed], before[:, changed])
    for gradient in torch.autograd.grad(before[:, changed].sum(), parts):
        assert not gradient[:, :, outside].any()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"softcap": 30.0}, "has softcap"),
        ({"s_aux": torch.zeros(HEADS)}, "has s_aux"),
        ({"dropout": 0.1}, "has dropout"),
        ({"cu_seq_lens_q": None}, "needs packed rows"),
    ],
)
def test_what_it_cannot_compute_is_refused(more: dict[str, object], named: str) -> None:
    arguments = build_row_arguments(OFFSETS) | more
    with pytest.raises(ValueError, match=named):
        attend_within_rows(torch.nn.Identity(), *draw_packed(), None, scaling=0.3, **arguments)


@pytest.fixture(params=[(), ("cpu",)], ids=["in chunks", "at once"])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of five tokens; kept logits are scored as on a GPU, or as on a CPU."""
    monkeypatch.setattr(head_module, "CHUNK_TOKENS", 5)
    monkeypatch.setattr(head_module, "_ROOMY", request.param)


def build_head(tokens: int, vocabulary: int = 50) -> tuple[FusedHead, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    layer = FusedHead(16, vocabulary, bias=False)
    hidden = torch.randn(1, tokens, 16, requires_grad=True)
    return layer, hidden, torch.randint(vocabulary, (tokens,))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("temperature", [1.0, 0.6, "each"])
@pytest.mark.parametrize("tokens", [0, 1, 5, 12])
def test_log_probs_and_entropies_are_those_of_numpy(temperature: float | str, tokens: int) -> None:
    layer, hidden, labels = build_head(tokens)
    one = torch.linspace(0.4, 1.7, tokens) if temperature == "each" else float(temperature)
    question = HeadQuery(labels, one, None, entropy=True, entropy_gradient=False)
    kept = score_logits(layer(hidden), question)
    layer.question = question
    fused = layer(hidden)[0].unbind(-1)
    scaled = hidden[0].detach().double().numpy() @ layer.weight.detach().double().numpy().T
    scaled = scaled / (one.double().numpy()[:, None] if isinstance(one, torch.Tensor) else one)
    probabilities = np.exp(scaled - scaled.max(-1, keepdims=True, initial=-np.inf))
    probabilities /= probabilities.sum(-1, keepdims=True)
    expected = [
        np.log(probabilities[np.arange(tokens), labels.numpy()]),
        -(probabilities * np.log(probabilities)).sum(-1),
    ]
    for computed in (fused, kept):
        for result, value in zip(computed, expected, strict=True):
            assert result is not None
            np.testing.assert_allclose(result.detach().numpy(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("temperature", [1.0, 0.6, "each"])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_are_those_of_a_plain_computation(
    temperature: float | str, entropy_gradient: bool, is_frozen: bool
) -> None:
    tokens = 12
    layer, hidden, labels = build_head(tokens)
    layer.weight.requires_grad_(not is_frozen)
    one = torch.linspace(0.4, 1.7, tokens) if temperature == "each" else float(temperature)
    chosen = torch.tensor([3, 0, 11, 7, 7, 1, 2])
    some = one[chosen] if isinstance(one, torch.Tensor) else one
    question = HeadQuery(labels[chosen], some, chosen, entropy=True, entropy_gradient=entropy_gradient)
    weights = torch.randn(2, len(chosen))

    def combine(log_probs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        assert entropy is not None
        return (weights[0] * log_probs).sum() + (weights[1] * entropy).sum()

    leaves = [hidden] if is_frozen else [hidden, layer.weight]
    every = (hidden[0] @ layer.weight.T / (one[:, None] if isinstance(one, torch.Tensor) else one)).log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    plain = combine(every[chosen, labels[chosen]], (entropy if entropy_gradient else entropy.detach())[chosen])
    expected = torch.autograd.grad(plain, leaves)
    kept = torch.autograd.grad(combine(*score_logits(layer(hidden), question)), leaves)
    layer.question = question
    fused = torch.autograd.grad(combine(*layer(hidden)[0].unbind(-1)), leaves)
    for result in (kept, fused):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=5e-6)


def test_logits_never_exist_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a forward and backward pass is as large as the logits."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.numel = max([self.numel, *sizes])
            return result

    monkeypatch.setattr(head_module, "CHUNK_TOKENS", 10)
    layer, hidden, labels = build_head(200, vocabulary=300)
    layer.question = HeadQuery(labels, 1.0, None, entropy=True, entropy_gradient=True)
    with Largest() as largest:
        layer(hidden).sum().backward()
    assert largest.numel == 300 * 16


@pytest.mark.parametrize(
    ("kind", "more", "obstacle"),
    [
        ("qwen2", {}, None),
        ("llama", {"tie_word_embeddings": False}, None),
        ("qwen3", {}, None),
        ("gpt2", {"n_embd": 32, "n_head": 2, "n_layer": 1}, None),
        ("gemma2", {}, "changes what its output layer computes"),
        ("granite", {"logits_scaling": 8.0}, "changes what its output layer computes"),
        ("phi", {"tie_word_embeddings": False}, "the output layer is Linear.*bias=True"),
        ("qwen3_moe", {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}, None),
    ],
)
def test_models_whose_logits_are_not_a_bare_linear_layer_are_told_apart(
    kind: str, more: dict[str, object], obstacle: str | None
) -> None:
    found = find_obstacle(build_random_model(kind, 1, vocab_size=99, **more))
    assert (found is None) == (obstacle is None)
    if obstacle is not None:
        assert found is not None
        assert re.search(obstacle, found)


class Curious(Qwen2ForCausalLM):  # type: ignore[misc, unused-ignore]
    """A model whose pass reads a value."""

    def forward(self, input_ids: torch.Tensor, **more: Any) -> Any:
        assert input_ids.sum().item() >= 0
        return super().forward(input_ids, **more)


def test_a_model_that_cannot_be_asked_without_weights_keeps_its_logits() -> None:
    obstacle = find_obstacle(Curious(build_random_model("qwen2", 1, vocab_size=99).config))
    assert obstacle is not None
    assert "no pass without weights" in obstacle


def test_in_bf16_every_row_has_its_temperature_and_not_one_rounded_to_bf16() -> None:
    draw = torch.Generator().manual_seed(1)
    layer = FusedHead(64, 2, bias=False, dtype=torch.bfloat16)
    hidden = (-torch.rand((1, 2000, 64), generator=draw)).bfloat16()
    with torch.no_grad():
        layer.weight.copy_(torch.stack([torch.ones(64), torch.zeros(64)]))
        temperature = torch.full((2000,), 0.7)
        layer.question = HeadQuery(torch.zeros(2000, dtype=torch.long), temperature, None, True, False)
        log_probs = layer(hidden)[0, :, 0].double()
    expected = torch.stack([hidden[0].double().sum(-1) / 0.7, torch.zeros(2000)], -1).log_softmax(-1)[:, 0]
    assert float(log_probs.mean() / expected.mean()) == pytest.approx(1, abs=3e-4)
