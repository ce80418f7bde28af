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

None is differentiable twice, see `once`.

`torch.distributed.nn.functional` differs: its all-reduce adds up the gradients of losses that every rank has in full.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_dist.comm.mesh import Axis
from lightning_dist.comm.once import once_differentiable
from lightning_dist.comm.parts import part_of
from lightning_dist.core.split import Split

ACTIVATIONS, SHARED_GRADIENTS = "activations", "shared gradients"
Move = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """One move forward, its adjoint backward. The adjoint communicates, so it cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Move, back: Move) -> Tensor:
        ctx.back = back
        moved = forth(x)
        return moved if forth is _same else moved.detach()  # a view made here could not be written into in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def _pair(x: Tensor, axis: Axis, forth: Move, back: Move) -> Tensor:
    if axis.size == 1:
        return x
    out: Tensor = _Pair.apply(x, forth, back)  # type: ignore[no-untyped-call]
    return out


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(axis: Axis, purpose: str) -> Move:
    return lambda x: axis.all_reduce(x.contiguous().clone(), purpose=purpose)


def _slice(axis: Axis, dim: int, split: Split) -> Move:
    return lambda x: part_of(x, dim, split, axis.rank).clone(memory_format=torch.contiguous_format)


def _gather(axis: Axis, dim: int, split: Split) -> Move:
    return lambda x: axis.gather_parts(x, dim, split, purpose=ACTIVATIONS)


def _scatter(axis: Axis, dim: int, split: Split) -> Move:
    return lambda x: axis.total_parts(x, dim, split, purpose=ACTIVATIONS)


def spread(x: Tensor, axis: Axis, *, purpose: str = ACTIVATIONS) -> Tensor:
    """`x` itself, the same on all ranks, about to be used differently on each: their gradients add up."""
    return _pair(x, axis, _same, _sum(axis, purpose))


def total(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the ranks, on all of them, to be used alike."""
    return _pair(x, axis, _sum(axis, ACTIVATIONS), _same)


def take(x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
    """This rank's part of `x`, which is the same on all ranks."""
    return _pair(x, axis, _slice(axis, dim, split), _gather(axis, dim, split))


def collect(x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
    """The whole from the ranks' parts, to be used alike on all of them."""
    return _pair(x, axis, _gather(axis, dim, split), _slice(axis, dim, split))


def collect_for_use(x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
    """The whole from the ranks' parts, to be used differently on each: their gradients add up."""
    return _pair(x, axis, _gather(axis, dim, split), _scatter(axis, dim, split))


def total_parts(x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
    """This rank's part of the sum over the ranks."""
    return _pair(x, axis, _scatter(axis, dim, split), _gather(axis, dim, split))
