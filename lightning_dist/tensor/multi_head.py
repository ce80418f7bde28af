"""`nn.MultiheadAttention` with cut projections: every rank computes its own heads.

PyTorch's function takes all weights at once. With cut ones it is computed here, as the module documents it; what the
options below do not cover (extra key-value rows, unbatched inputs) is computed on whole weights.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dist.tensor.layers import column_parallel, row_parallel
from lightning_dist.tensor.split_tensor import SplitTensor

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_UNSUPPORTED = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")


def multi_head(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The rule of `F.multi_head_attention_forward`: inputs (length, batch, embed), output and weights as there."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, out_weight = given["query"], given["out_proj_weight"]
    if any(given[name] is not None and given[name] is not False for name in _UNSUPPORTED):
        return NotImplemented
    if query.dim() != 3 or not isinstance(out_weight, SplitTensor):
        return NotImplemented
    projected = _project(given)
    if projected is None:
        return NotImplemented
    heads = given["num_heads"]
    q, k, v = (t.view(*t.shape[:2], heads, t.shape[2] // heads).transpose(1, 2) for t in projected)  # (n, heads, l, d)
    mask = _mask(given, q.shape[0], heads, q)
    dropout = given["dropout_p"] if given["training"] else 0.0
    if given["need_weights"]:
        scores = (q * (q.shape[-1] ** -0.5)) @ k.transpose(2, 3)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout) if dropout else weights
        attended = weights @ v
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    joined = attended.transpose(1, 2).flatten(2)  # (n, l, embed)
    out = row_parallel(joined, out_weight, given["out_proj_bias"], out_weight.lie).transpose(0, 1)
    if not given["need_weights"]:
        return out, None
    return out, weights.mean(1) if given["average_attn_weights"] else weights


def _project(given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Query, key and value, batch first, their features divided."""
    sources = [given[name] for name in ("query", "key", "value")]
    first = [sources[0].transpose(0, 1)]
    for source in sources[1:]:  # the same input stays one object, so that it is sent once
        known = next((t for s, t in zip(sources, first, strict=False) if s is source), None)
        first.append(source.transpose(0, 1) if known is None else known)
    bias = given["in_proj_bias"]
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
        biases = [None] * 3 if bias is None else list(bias.chunk(3))
    else:
        weight = given["in_proj_weight"]
        if sources[0] is sources[1] is sources[2] and isinstance(weight, SplitTensor):
            q, k, v = column_parallel(first[0], weight, bias, weight.lie).chunk(3, -1)
            return q, k, v
        weights, biases = list(weight.chunk(3)), [None] * 3 if bias is None else list(bias.chunk(3))
    if not all(isinstance(weight, SplitTensor) for weight in weights):
        return None
    q, k, v = (column_parallel(x, w, b, w.lie) for x, w, b in zip(first, weights, biases, strict=True))
    return q, k, v


def _mask(given: Mapping[str, Any], batch: int, heads: int, like: Tensor) -> Tensor | None:
    """Both masks as one that is added to the scores: (batch or 1, heads or 1, l or 1, s)."""
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    if mask is None and padding is None:
        return None
    total: Tensor | None = None
    for part, shape in ((mask, None), (padding, (batch, 1, 1, -1))):
        if part is None:
            continue
        added = _added(part, like)
        if shape is not None:
            added = added.view(shape)
        elif added.dim() == 3:
            added = added.view(batch, heads, *added.shape[1:])
        total = added if total is None else total + added
    return total


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, float("-inf"))
