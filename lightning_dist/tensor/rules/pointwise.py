"""Each output element depends on the operands' elements at the same place: arithmetic, casts, dropout, writes."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_dist.comm.parts import part_of
from lightning_dist.params.questions import without_answers
from lightning_dist.tensor.draws import local_draws
from lightning_dist.tensor.rules.operands import Args, Kwargs, first_split, matched, ndim_of
from lightning_dist.tensor.split_tensor import WRITABLE, Lie, SplitTensor, split_tensor, whole_shape, writes

DATA = getattr(Tensor, "data").__get__  # noqa: B009 (a descriptor)


def _all_matched(args: Args, kwargs: Kwargs, like: Lie, r: int) -> tuple[Args, Kwargs] | None:
    """The arguments with every tensor as it meets the parts; None where one cannot be matched."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            part = matched(leaf, like, r)
            if part is None:
                return None
            leaves[index] = part
    local: tuple[Args, Kwargs] = pytree.tree_unflatten(leaves, spec)
    return local


def elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Each output element depends on the operands' elements at the same place."""
    first = first_split(args, kwargs)
    r = ndim_of(first) - first.lie.dim
    local = _all_matched(args, kwargs, first.lie, r)
    if local is None:
        return NotImplemented
    out = func(*local[0], **local[1])
    if isinstance(out, tuple):  # where elements are, as `torch.where` of a condition alone
        return NotImplemented
    return split_tensor(out, Lie(first.lie.axis, out.ndim - r, first.lie.split)) if isinstance(out, Tensor) else out


def in_place(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Elementwise, into the first operand."""
    target = args[0]
    if not isinstance(target, SplitTensor):
        return NotImplemented
    local = _all_matched(args[1:], kwargs, target.lie, ndim_of(target) - target.lie.dim)
    if local is None:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        func(target, *local[0], **local[1])
    return target


def each(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`torch._foreach_*`: elementwise over lists, of which every tensor lies in its own way."""
    into = writes(func.__name__)
    operands = [list(value) if isinstance(value, (list, tuple)) else value for value in (*args, *kwargs.values())]
    lists = [operand for operand in operands if isinstance(operand, list)]
    lies: dict[int, tuple[Lie, int]] = {}
    for index, row in enumerate(zip(*lists, strict=False)):
        like = row[0] if into else next((leaf for leaf in row if isinstance(leaf, SplitTensor)), None)
        if not isinstance(like, SplitTensor):
            if any(isinstance(leaf, SplitTensor) for leaf in row):
                return NotImplemented
            continue
        r = ndim_of(like) - like.lie.dim
        lies[index] = (like.lie, r)
        for values in lists[into:]:
            if isinstance(values[index], Tensor):
                values[index] = matched(values[index], like.lie, r)
                if values[index] is None:
                    return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        out = func(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))
    if into:
        return None if out is None else args[0]
    return type(out)(
        split_tensor(tensor, Lie(lies[index][0].axis, tensor.ndim - lies[index][1], lies[index][0].split))
        if index in lies
        else tensor
        for index, tensor in enumerate(out)
    )


def casting(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`to` and `type_as`: another tensor gives no more than its dtype and device."""
    x, *rest = (without_answers(arg) if isinstance(arg, SplitTensor) else arg for arg in args)
    named = {k: without_answers(v) if isinstance(v, SplitTensor) else v for k, v in kwargs.items()}
    out = func(x, *rest, **named)
    return split_tensor(out, args[0].lie) if isinstance(args[0], SplitTensor) else out


def data_of(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`tensor.data` and `detach`: this rank's part without history; what is written there is written here."""
    part = without_answers(args[0])
    data = split_tensor(part.detach() if func is not DATA else part.data, args[0].lie)
    if WRITABLE in args[0].__dict__:
        data.__dict__[WRITABLE] = args[0].__dict__[WRITABLE]
    return data


def set_data(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``tensor.data = values``: whole values are cut to match."""
    target, values = args
    if not isinstance(target, SplitTensor):
        return NotImplemented
    lie = target.lie
    if isinstance(values, SplitTensor):
        values = without_answers(values)
    elif tuple(values.shape) == whole_shape(target):
        values = part_of(values, lie.dim, lie.split, lie.axis.rank).contiguous()
    with torch._C.DisableTorchFunctionSubclass():
        return func(target, values)


def hooking(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`register_hook`: the hook sees the gradient as the tensor is seen, and may return another one."""
    x, hook = (*args, *kwargs.values())[:2]
    lie, ndim = x.lie, ndim_of(x)

    def seen(gradient: Tensor) -> Tensor | None:
        result = hook(split_tensor(gradient, lie))
        return None if result is None else matched(result, lie, ndim - lie.dim)

    with torch._C.DisableTorchFunctionSubclass():
        return func(x, seen)


def dropping(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Dropout; where nothing is dropped, no numbers are drawn."""
    given = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    draws = given.get("training", True) and given.get("p", 0.5) > 0
    return (drawing if draws else elementwise)(func, args, kwargs)


def drawing(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Elementwise with random numbers: every rank draws its own for its part."""
    first = first_split(args, kwargs)
    with local_draws(first.lie.axis, without_answers(first).device):
        return elementwise(func, args, kwargs)


def drawing_like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`rand_like` and `randn_like`: this rank's part of the numbers that one process would have drawn."""
    lie, like = args[0].lie, without_answers(args[0])
    numbers = func(like.new_empty(whole_shape(args[0])), *args[1:], **kwargs)
    return split_tensor(part_of(numbers, lie.dim, lie.split, lie.axis.rank).contiguous(), lie)
