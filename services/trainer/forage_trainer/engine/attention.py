"""Attention over packed rows without the package flash_attn, registered with Transformers as `varlen`.

On GPUs it is PyTorch's own variable-length FlashAttention. Where that has no kernel (CPUs, fp32) it is PyTorch's
attention row by row, which computes no padding either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

VARLEN = "varlen"
PACKED = ("flash_attention_2", VARLEN, "flex_attention")
"""Attention implementations that keep packed rows apart at no cost for the pairs of tokens that they leave out."""
_HALF = (torch.bfloat16, torch.float16)
_UNSUPPORTED = ("softcap", "s_aux")
"""Arguments of models whose attention is more than a softmax of scaled products."""
_AMPERE = (8, 0)


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
    unsupported = [name for name in _UNSUPPORTED if others.get(name) is not None]
    unsupported += ["dropout"] if dropout else []
    if unsupported:
        raise ValueError(f"the attention of {type(module).__name__} has {unsupported[0]}, which varlen lacks")
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
    rows = [_attend(q, k, v, scaling, sliding_window) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(rows, dim=2).transpose(1, 2), None


def register_varlen() -> None:
    """Make `attn_implementation=varlen` known to Transformers, which builds no mask for it."""
    AttentionInterface.register(VARLEN, attend_within_rows)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    length = query.shape[2]
    mask = None
    if window is not None and window < length:
        position = torch.arange(length, device=query.device)
        distance = position[:, None] - position
        mask = (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
