"""What an operation meets: operands as they have to be beside the parts of a `SplitTensor`.

Dims are counted from the right while operands of different numbers of dims meet (``r = ndim - dim``), as broadcasting
does.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_dist.comm import pairs
from lightning_dist.params.questions import without_answers
from lightning_dist.tensor.split_tensor import Lie, SplitTensor, whole

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Rule = Callable[[Any, Args, Kwargs], Any]


def named(args: Args, kwargs: Kwargs, *names: str) -> list[Any]:
    """Arguments in the order of `names`, whether they came by place or by name; None for what was not given."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given.get(name) for name in names]


def ndim_of(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.ndim


def matched(operand: Tensor, like: Lie, r: int) -> Tensor | None:
    """An operand of an elementwise function as it meets parts that lie along the dim `r` from the right."""
    if isinstance(operand, SplitTensor):
        lie = operand.lie
        if ndim_of(operand) - lie.dim == r and lie.split == like.split:
            return without_answers(operand)
        operand = whole(operand)
    dim = operand.ndim - r
    if dim >= 0 and torch._C._current_graph_task_id() >= 0 and operand.shape[dim] == like.local_size != like.split.size:
        return operand  # in the backward of a user's autograd function: an output that it saved comes back as the part
    if dim >= 0 and operand.shape[dim] == like.split.size and like.split.size != 1:
        return pairs.take(operand, like.axis, dim, like.split)
    if dim < 0 or operand.shape[dim] == 1:
        return shared(operand, like)
    return None


def shared(operand: Tensor, like: Lie) -> Tensor:
    """An operand that every rank uses whole beside its own part: its gradients are summed."""
    if isinstance(operand, SplitTensor):
        operand = whole(operand)
    if not operand.requires_grad:
        return operand
    return pairs.spread(operand, like.axis, purpose=pairs.SHARED_GRADIENTS)


def first_split(args: Args, kwargs: Kwargs) -> SplitTensor:
    return next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SplitTensor))
