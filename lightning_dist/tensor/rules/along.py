"""Along dims that are not divided: reductions, softmax, norms."""

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_dist.params.questions import without_answers
from lightning_dist.tensor.rules.operands import Args, Kwargs, Rule, ndim_of, shared
from lightning_dist.tensor.split_tensor import Lie, SplitTensor, split_tensor


def _dims(value: Any, ndim: int) -> list[int] | None:
    if value is None:
        return None
    dims = [value] if isinstance(value, int) else list(value)
    return [d % ndim for d in dims]


def reduction(position: int) -> Rule:
    """Over dims that are not divided, given as argument number `position` or by name."""

    def rule(func: Any, args: Args, kwargs: Kwargs) -> Any:
        return _reduce(func, args, kwargs, kwargs.get("dim", args[position] if len(args) > position else None))

    return rule


def _reduce(func: Any, args: Args, kwargs: Kwargs, value: Any) -> Any:
    x = args[0]
    if not isinstance(x, SplitTensor) or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(args[1:])):
        return NotImplemented
    if value is None or isinstance(value, bool):
        return NotImplemented
    ndim = ndim_of(x)
    dims = _dims(value, ndim)
    if not dims or x.lie.dim in dims:
        return NotImplemented
    out = func(without_answers(x), *args[1:], **kwargs)

    def lying(result: Tensor) -> SplitTensor:
        dim = x.lie.dim if result.ndim == ndim else x.lie.dim - sum(d < x.lie.dim for d in dims)
        return split_tensor(result, Lie(x.lie.axis, dim, x.lie.split))

    if isinstance(out, Tensor):
        return lying(out)
    return type(out)([lying(result) for result in out]) if isinstance(out, tuple) else NotImplemented


def along(position: int, default: int | None = None) -> Rule:
    """Along one dim (softmax, cumsum), given as argument number `position` or by name; the shape stays."""

    def rule(func: Any, args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        if not isinstance(x, SplitTensor) or not isinstance(dim, int) or dim % ndim_of(x) == x.lie.dim:
            return NotImplemented
        return split_tensor(func(without_answers(x), *args[1:], **kwargs), x.lie)

    return rule


def normalization(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Layer norm or RMS norm over trailing dims that are not divided; weights are used by all ranks."""
    x = args[0]
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else None)
    if not isinstance(x, SplitTensor) or shape is None or ndim_of(x) - x.lie.dim <= len(shape):
        return NotImplemented
    rest = [shared(leaf, x.lie) if isinstance(leaf, Tensor) else leaf for leaf in args[1:]]
    named = {k: shared(v, x.lie) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    return split_tensor(func(without_answers(x), *rest, **named), x.lie)
