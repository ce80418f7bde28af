"""Cross entropy of logits that are divided along the vocabulary (Shoeybi et al. 2019, sec. 3).

With z the logits of one token, of which this rank holds z_v for v in its part, t the target and V the vocabulary::

    m = max over ranks max z      Z = sum over ranks sum exp(z - m)       all-reduce of one number per token each
    nll = log Z + m - z_t         d nll / d z_v = exp(z_v - m) / Z - [v = t]

So all-reduces of three numbers per token (the third is for label smoothing: the sum of all, weighted, logits) take the
place of gathering V numbers per token.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lightning_dist.comm.mesh import Axis
from lightning_dist.comm.once import once_differentiable
from lightning_dist.core.split import Split
from lightning_dist.tensor.autocast import loss_dtype

PURPOSE = "loss"


class _TokenLosses(torch.autograd.Function):
    """(tokens, V/tp) logits -> for each token its negative log-likelihood, and ``sum_v w_v (log Z + m - z_v)``."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, weight_sum: float, axis: Axis, start: int
    ) -> tuple[Tensor, Tensor]:
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        tokens, width = wide.shape
        highest = wide.amax(-1) if width else wide.new_full((tokens,), -math.inf)
        axis.all_reduce(highest, purpose=PURPOSE, op="max")
        own = target - start
        mine = (own >= 0) & (own < width)
        place = own.clamp(0, max(width - 1, 0)).unsqueeze(-1)
        exps = (wide - highest.unsqueeze(-1)).exp_()
        weighted = wide if weight is None else wide * weight
        at_target = wide.gather(-1, place).squeeze(-1) * mine if width else torch.zeros_like(highest)
        sums = torch.stack([exps.sum(-1), at_target, weighted.sum(-1)])
        axis.all_reduce(sums, purpose=PURPOSE)
        total, at_target, weighted_sum = sums.unbind()
        log_z = total.log() + highest
        ctx.save_for_backward(exps.div_(total.unsqueeze(-1)), place, mine, weight)
        ctx.dtype, ctx.weight_sum = logits.dtype, weight_sum
        return log_z - at_target, weight_sum * log_z - weighted_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        by_target, by_all = grads
        softmax, place, mine, weight = ctx.saved_tensors
        out = softmax * (by_target + ctx.weight_sum * by_all).unsqueeze(-1)
        if out.shape[-1]:
            out.scatter_add_(-1, place, -(by_target * mine).unsqueeze(-1).to(out.dtype))
        out -= by_all.unsqueeze(-1) * (1.0 if weight is None else weight)
        return out.to(ctx.dtype), None, None, None, None, None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: Axis,
    split: Split,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of divided logits; the same value on all ranks of `axis`.

    Args:
        logits: (..., V/tp), this rank's part of the vocabulary in its last dim.
        target: (...), indices into the whole vocabulary, the same on all ranks.
        weight: (V,), as there; so are the other arguments.
    """
    shape, size = target.shape, split.size
    flat = target.reshape(-1)
    kept = flat != ignore_index
    start, width = split.start(axis.rank), split.sizes[axis.rank]
    _refuse_outside(flat, kept, size)
    own_weight = None if weight is None else weight.detach()[start : start + width].to(logits.dtype)
    weight_sum = float(size) if weight is None else float(weight.detach().sum())
    target_weight = kept.to(_wide(logits.dtype))
    if weight is not None:
        target_weight = target_weight * weight.detach().to(target_weight.dtype)[flat.clamp(0, size - 1)]
    nll, over_all = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, logits.shape[-1]), flat.clamp(0, size - 1), own_weight, weight_sum, axis, start
    )
    zero = nll.new_zeros(())
    nll = torch.where(kept, nll * target_weight, zero)
    smooth = torch.where(kept, over_all, zero) / size
    tokens = (1.0 - label_smoothing) * nll + label_smoothing * smooth if label_smoothing else nll
    if reduction == "none":
        return tokens.view(shape).to(loss_dtype(logits))
    summed = tokens.sum()
    out: Tensor = summed / target_weight.sum() if reduction == "mean" else summed
    return out.to(loss_dtype(logits))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _refuse_outside(target: Tensor, kept: Tensor, size: int) -> None:
    """An index outside the vocabulary would belong to no rank and silently count as a logit of 0."""
    if target.device.type == "cpu" and bool((kept & ((target < 0) | (target >= size))).any()):
        raise IndexError(f"a target is outside the vocabulary of {size}")
