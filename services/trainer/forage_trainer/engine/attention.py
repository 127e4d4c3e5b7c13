"""Attention over packed rows, and over trees of rows, registered with Transformers as `varlen` and `prefix_tree`.

`varlen` needs no package flash_attn. On GPUs it is PyTorch's own variable-length FlashAttention. Where that has no
kernel (CPUs, fp32) it is PyTorch's attention row by row, which computes no padding either.

`prefix_tree` attends with the tokens that a row adds to the tree to all tokens of the row, row by row as well. On a CPU
one mask for the whole tree takes three times as long, since it computes the pairs that it leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from forage_trainer.data.prefix_tree import PrefixTree

VARLEN = "varlen"
PREFIX_TREE = "prefix_tree"
"""Name of the attention, and of its argument with the tree."""
PACKED = ("flash_attention_2", VARLEN, "flex_attention")
"""Attention implementations that keep packed rows apart at no cost for the pairs of tokens that they leave out."""
_HALF = (torch.bfloat16, torch.float16)
_UNSUPPORTED = ("softcap", "s_aux")
"""Arguments of models whose attention is more than a softmax of scaled products."""
_AMPERE = (8, 0)


@dataclass(frozen=True)
class TreeAttention:
    """A tree as its attention takes it; `masks` keeps the masks of all layers of a micro-batch."""

    tree: PrefixTree
    masks: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)

    def mask(self, query: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
        """Look up the additive mask of the last tokens of so many, which are those of `query`."""
        key = (query.shape[2], length, window, query.dtype)
        if key not in self.masks:
            seen = _see(query.shape[2], length, window, query.device)
            self.masks[key] = query.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        return self.masks[key]


def has_kernel(query: torch.Tensor) -> bool:
    """Whether PyTorch's variable-length attention runs on the query's device and type."""
    on_nvidia = (
        query.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(query.device) >= _AMPERE
    )
    return on_nvidia and query.dtype in _HALF


def build_row_arguments(offsets: torch.Tensor) -> dict[str, Any]:
    """Build the arguments that tell packed attention where rows begin and end, under Transformers' names.

    Args:
        offsets: (rows + 1,), from 0 to the number of tokens.
    """
    bounds = offsets.to(torch.int32)
    longest = int(offsets.diff().max())
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def attend_within_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each row of one packed batch; the interface is Transformers'.

    Args:
        query, key, value: (1, heads, tokens, width); key and value may have fewer heads.

    Returns: (1, tokens, heads, width).

    Raises:
        ValueError: rows are not packed, or the model's attention has a term that this one lacks.
    """
    _refuse_terms(module, dropout, others, VARLEN)
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise ValueError("varlen attention needs packed rows and their bounds: set trainer.engine.use_remove_padding")
    if has_kernel(query):
        packed = varlen_attn(
            *(part.transpose(1, 2)[0] for part in (query, key, value)),
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            # The window counts the token itself here, and not in PyTorch.
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(packed, torch.Tensor)
        return packed.unsqueeze(0), None
    lengths = cu_seq_lens_q.diff().tolist()
    parts = (part.split(lengths, dim=2) for part in (query, key, value))
    rows = []
    for q, k, v in zip(*parts, strict=True):
        length = q.shape[2]
        is_causal = sliding_window is None or sliding_window >= length
        mask = None if is_causal else _see(length, length, sliding_window, q.device)
        rows.append(_attend(q, k, v, scaling, mask))
    return torch.cat(rows, dim=2).transpose(1, 2), None


def attend_along_tree(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    prefix_tree: TreeAttention | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from each token of a tree to it and to those before it in its row; the interface is Transformers'.

    Args:
        query, key, value: (1, heads, tokens of the tree, width); key and value may have fewer heads.

    Returns: (1, tokens of the tree, heads, width).

    Raises:
        ValueError: there is no tree, or the model's attention has a term that this one lacks.
    """
    _refuse_terms(module, dropout, others, PREFIX_TREE)
    if prefix_tree is None or attention_mask is not None:
        raise ValueError("the attention of a tree needs the tree, and takes no mask")
    tree = prefix_tree.tree
    queries = query.split([tail.size for tail in tree.tails], dim=2)
    # Cut into pieces once: a piece of many rows then has one gradient of its own size for each, not of the tree's.
    keys, values = (part.split(tree.pieces, dim=2) for part in (key, value))
    attended = []
    for part, tail in zip(queries, tree.tails, strict=True):
        seen, weighed = (torch.cat([pieces[piece] for piece in tail.path], dim=2) for pieces in (keys, values))
        length = seen.shape[2]
        window = None if sliding_window is None or sliding_window >= length else sliding_window
        mask = None if tail.size == length and window is None else prefix_tree.mask(part, length, window)
        attended.append(_attend(part, seen, weighed, scaling, mask))
    return torch.cat(attended, dim=2).transpose(1, 2), None


def register_attentions() -> None:
    """Make both known to Transformers as `attn_implementation`, which builds no mask for them."""
    AttentionInterface.register(VARLEN, attend_within_rows)
    AttentionInterface.register(PREFIX_TREE, attend_along_tree)


def _refuse_terms(module: torch.nn.Module, dropout: float, others: dict[str, Any], attention: str) -> None:
    unsupported = [name for name in _UNSUPPORTED if others.get(name) is not None]
    unsupported += ["dropout"] if dropout else []
    if unsupported:
        raise ValueError(f"the attention of {type(module).__name__} has {unsupported[0]}, which {attention} lacks")


def _see(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which of `keys` tokens each of the last `queries` ones sees, (queries, keys) bool."""
    position = torch.arange(keys, device=device)
    distance = position[keys - queries :, None] - position
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend by a mask, or causally without one."""
    return scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
