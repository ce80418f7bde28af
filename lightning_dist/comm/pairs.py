"""Conjugate pairs: collectives that know their own backward.

Between a tensor that all ranks hold alike and one of which each holds a part, or a part of a sum, data moves by a
collective, and gradients move back by its adjoint (Shoeybi et al. 2019, arXiv 1909.08053, sec. 3: f and g; Korthikanti
et al. 2022, arXiv 2205.05198, sec. 4.2.2: g and g-bar). Each function below is the backward of another one:

    =================  ==================  =========================================================
    function           backward            from -> to
    =================  ==================  =========================================================
    `spread`           all-reduce          the same everywhere -> the same, used differently (f)
    `total`            identity            a summand on each -> the sum everywhere (g)
    `take`             all-gather          the same everywhere -> a part on each
    `collect`          slice               a part on each -> the whole everywhere, used alike
    `collect_for_use`  reduce-scatter      a part on each -> the whole everywhere, used differently
    `total_parts`      all-gather          a summand on each -> a part of the sum on each
    =================  ==================  =========================================================

None is differentiable twice: a collective in backward leaves no trace for a second one, which would be silently wrong.

`torch.distributed.nn.functional` differs: its all-reduce adds up the gradients of losses that every rank has in full.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dist.comm.mesh import Axis
from lightning_dist.comm.parts import part_of
from lightning_dist.core.split import Split

ACTIVATIONS, SHARED_GRADIENTS = "activations", "shared gradients"


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, purpose: str) -> Tensor:
        ctx.axis, ctx.purpose = axis, purpose
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.all_reduce(grads[0].contiguous().clone(), purpose=ctx.purpose), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce(x.contiguous().clone(), purpose=ACTIVATIONS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
        ctx.axis, ctx.dim, ctx.split = axis, dim, split
        part = part_of(x, dim, split, axis.rank)
        return part.clone() if len(split.parts[axis.rank]) == 1 else part

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.gather_parts(grads[0], ctx.dim, ctx.split, purpose=ACTIVATIONS), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
        ctx.axis, ctx.dim, ctx.split = axis, dim, split
        return axis.gather_parts(x, dim, split, purpose=ACTIVATIONS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return part_of(grads[0], ctx.dim, ctx.split, ctx.axis.rank).contiguous(), None, None, None


class _CollectForUse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
        ctx.axis, ctx.dim, ctx.split = axis, dim, split
        return axis.gather_parts(x, dim, split, purpose=ACTIVATIONS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.total_parts(grads[0], ctx.dim, ctx.split, purpose=ACTIVATIONS), None, None, None


class _TotalParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
        ctx.axis, ctx.dim, ctx.split = axis, dim, split
        return axis.total_parts(x, dim, split, purpose=ACTIVATIONS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.gather_parts(grads[0], ctx.dim, ctx.split, purpose=ACTIVATIONS), None, None, None


def spread(x: Tensor, axis: Axis, *, purpose: str = ACTIVATIONS) -> Tensor:
    """`x` itself, the same on all ranks, about to be used differently on each: their gradients add up."""
    if axis.size == 1:
        return x
    out: Tensor = _Spread.apply(x, axis, purpose)  # type: ignore[no-untyped-call]
    return out


def total(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the ranks, on all of them, to be used alike."""
    if axis.size == 1:
        return x
    out: Tensor = _Total.apply(x, axis)  # type: ignore[no-untyped-call]
    return out


def take(x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
    """This rank's part of `x`, which is the same on all ranks."""
    if axis.size == 1:
        return x
    out: Tensor = _Take.apply(x, axis, dim, split)  # type: ignore[no-untyped-call]
    return out


def collect(x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
    """The whole from the ranks' parts, to be used alike on all of them."""
    if axis.size == 1:
        return x
    out: Tensor = _Collect.apply(x, axis, dim, split)  # type: ignore[no-untyped-call]
    return out


def collect_for_use(x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
    """The whole from the ranks' parts, to be used differently on each: their gradients add up."""
    if axis.size == 1:
        return x
    out: Tensor = _CollectForUse.apply(x, axis, dim, split)  # type: ignore[no-untyped-call]
    return out


def total_parts(x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
    """This rank's part of the sum over the ranks."""
    if axis.size == 1:
        return x
    out: Tensor = _TotalParts.apply(x, axis, dim, split)  # type: ignore[no-untyped-call]
    return out
