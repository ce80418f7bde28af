"""How operations act on the parts of a `SplitTensor`: one table from torch functions to rules.

A rule gets what the user's code called and returns what it should see, or `NotImplemented` where this call does not
keep the parts apart; the operation is then computed on the whole. Dims are counted from the right while operands of
different numbers of dims meet (``r = ndim - dim``), as broadcasting does.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lightning_dist.comm import pairs
from lightning_dist.comm.parts import part_of
from lightning_dist.core.split import Split
from lightning_dist.params.questions import without_answers
from lightning_dist.tensor.draws import local_draws
from lightning_dist.tensor.layers import SEQUENCE, add_bias, column_parallel, row_parallel, vocab_parallel_embedding
from lightning_dist.tensor.loss import cross_entropy
from lightning_dist.tensor.multi_head import multi_head
from lightning_dist.tensor.parameter import CutParameter
from lightning_dist.tensor.split_tensor import RULES as RULES
from lightning_dist.tensor.split_tensor import WRITABLE, Lie, SplitTensor, split_tensor, whole, whole_shape

_DATA = getattr(Tensor, "data").__get__  # noqa: B009 (a descriptor)
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Rule = Callable[[Any, Args, Kwargs], Any]


# Operands -------------------------------------------------------------------------------------------------------


def _ndim(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.ndim


def _matched(operand: Tensor, like: Lie, r: int) -> Tensor | None:
    """An operand of an elementwise function as it meets parts that lie along the dim `r` from the right."""
    if isinstance(operand, SplitTensor):
        lie = operand.lie
        if _ndim(operand) - lie.dim == r and lie.split == like.split:
            return without_answers(operand)
        operand = whole(operand)
    dim = operand.ndim - r
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


def _first_split(args: Args, kwargs: Kwargs) -> SplitTensor:
    return next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SplitTensor))


# Elementwise ----------------------------------------------------------------------------------------------------


def elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Each output element depends on the operands' elements at the same place."""
    first = _first_split(args, kwargs)
    r = _ndim(first) - first.lie.dim
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            part = _matched(leaf, first.lie, r)
            if part is None:
                return NotImplemented
            leaves[index] = part
    local_args, local_kwargs = pytree.tree_unflatten(leaves, spec)
    out = func(*local_args, **local_kwargs)
    return split_tensor(out, Lie(first.lie.axis, out.ndim - r, first.lie.split)) if isinstance(out, Tensor) else out


def in_place(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Elementwise, into the first operand."""
    target = args[0]
    if not isinstance(target, SplitTensor):
        return NotImplemented
    r = _ndim(target) - target.lie.dim
    leaves, spec = pytree.tree_flatten((args[1:], dict(kwargs)))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            part = _matched(leaf, target.lie, r)
            if part is None:
                return NotImplemented
            leaves[index] = part
    local_args, local_kwargs = pytree.tree_unflatten(leaves, spec)
    with torch._C.DisableTorchFunctionSubclass():
        func(target, *local_args, **local_kwargs)
    return target


def casting(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`to` and `type_as`: another tensor gives no more than its dtype and device."""
    x, *rest = (without_answers(arg) if isinstance(arg, SplitTensor) else arg for arg in args)
    named = {k: without_answers(v) if isinstance(v, SplitTensor) else v for k, v in kwargs.items()}
    out = func(x, *rest, **named)
    return split_tensor(out, args[0].lie) if isinstance(args[0], SplitTensor) else out


def data_of(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`tensor.data` and `detach`: this rank's part without history; what is written there is written here."""
    part = without_answers(args[0])
    data = split_tensor(part.detach() if func is not _DATA else part.data, args[0].lie)
    if WRITABLE in args[0].__dict__:
        data.__dict__[WRITABLE] = True
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
    lie, ndim = x.lie, _ndim(x)

    def seen(gradient: Tensor) -> Tensor | None:
        result = hook(split_tensor(gradient, lie))
        return None if result is None else _matched(result, lie, ndim - lie.dim)

    with torch._C.DisableTorchFunctionSubclass():
        return func(x, seen)


def dropping(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Dropout; where nothing is dropped, no numbers are drawn."""
    given = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    draws = given.get("training", True) and given.get("p", 0.5) > 0
    return (drawing if draws else elementwise)(func, args, kwargs)


def drawing(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Elementwise with random numbers: every rank draws its own for its part."""
    first = _first_split(args, kwargs)
    with local_draws(first.lie.axis, without_answers(first).device):
        return elementwise(func, args, kwargs)


# Along other dims -----------------------------------------------------------------------------------------------


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
    ndim = _ndim(x)
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
        if not isinstance(x, SplitTensor) or not isinstance(dim, int) or dim % _ndim(x) == x.lie.dim:
            return NotImplemented
        return split_tensor(func(without_answers(x), *args[1:], **kwargs), x.lie)

    return rule


def normalization(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Layer norm or RMS norm over trailing dims that are not divided; weights are used by all ranks."""
    x = args[0]
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else None)
    if not isinstance(x, SplitTensor) or shape is None or _ndim(x) - x.lie.dim <= len(shape):
        return NotImplemented
    rest = [shared(leaf, x.lie) if isinstance(leaf, Tensor) else leaf for leaf in args[1:]]
    named = {k: shared(v, x.lie) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    return split_tensor(func(without_answers(x), *rest, **named), x.lie)


# Shapes ---------------------------------------------------------------------------------------------------------


def reshape(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The divided dim kept, merged with what follows it, or viewed as several."""
    x = args[0]
    shape = args[1:] if len(args) > 1 else kwargs.get("shape", kwargs.get("size"))
    if shape is not None and len(shape) == 1 and not isinstance(shape[0], int):
        shape = shape[0]
    if not isinstance(x, SplitTensor) or not _is_shape(shape):
        return NotImplemented
    return _reshape(without_answers(x), whole_shape(x), x.lie, [int(s) for s in shape])


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, Sequence) and all(isinstance(size, (int, torch.SymInt)) for size in shape)


def _reshape(part: Tensor, have: tuple[int, ...], lie: Lie, want: list[int]) -> Any:
    if -1 in want:
        known = -prod(want)
        if known == 0 or prod(have) % known:
            return NotImplemented
        want[want.index(-1)] = prod(have) // known
    if prod(want) != prod(have) or prod(have) == 0:
        return NotImplemented
    before, size = prod(have[: lie.dim]), have[lie.dim]
    split: Split | None
    for j in range(len(want)):  # merged with what stands before it, and with nothing behind
        outer = before // max(prod(want[:j]), 1)
        if outer > 1 and before % prod(want[:j]) == 0 and want[j] == outer * size and len(lie.split.blocks) == 1:
            split = lie.split.repeated(outer)
            local_shape = [*want[:j], split.sizes[lie.axis.rank], *want[j + 1 :]]
            return split_tensor(part.reshape(local_shape), Lie(lie.axis, j, split))
    places = [j for j in range(len(want)) if prod(want[:j]) == before]
    for j in sorted(places, key=lambda j: want[j] == 1):
        split = None
        blocks = lie.split.blocks
        if want[j] % size == 0:
            split = lie.split.times(want[j] // size)
        elif len(blocks) > 1 and want[j] == len(blocks) and len(set(blocks)) == 1:
            inner = Lie(lie.axis, lie.dim + 1, lie.split.block(0))
            shape = (*have[: lie.dim], len(blocks), blocks[0], *have[lie.dim + 1 :])
            local = part.reshape(*part.shape[: lie.dim], len(blocks), -1, *part.shape[lie.dim + 1 :])
            return _reshape(local, shape, inner, want)
        elif size % want[j] == 0:
            split = lie.split.over(size // want[j])
        if split is not None:
            local_shape = [*want[:j], split.sizes[lie.axis.rank], *want[j + 1 :]]
            return split_tensor(part.reshape(local_shape), Lie(lie.axis, j, split))
    return NotImplemented


def flatten(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`flatten` in terms of `reshape`."""
    x = args[0]
    if not isinstance(x, SplitTensor):
        return NotImplemented
    shape = whole_shape(x)
    start = kwargs.get("start_dim", args[1] if len(args) > 1 else 0) % len(shape)
    end = kwargs.get("end_dim", args[2] if len(args) > 2 else -1) % len(shape)
    return _reshape(without_answers(x), shape, x.lie, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


def unflatten(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`unflatten` in terms of `reshape`."""
    x, dim, sizes = (*args, *kwargs.values())[:3]
    if not isinstance(x, SplitTensor) or not isinstance(dim, int) or not _is_shape(sizes):
        return NotImplemented
    shape = whole_shape(x)
    dim, sizes = dim % len(shape), list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -prod(sizes)
    return _reshape(without_answers(x), shape, x.lie, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def permutation(order: Callable[[Args, Kwargs, int], Sequence[int] | None]) -> Rule:
    """Dims in another order."""

    def rule(func: Any, args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        dims = order(args, kwargs, _ndim(x)) if isinstance(x, SplitTensor) else None
        if dims is None:
            return NotImplemented
        part = without_answers(x).permute(*dims)
        return split_tensor(part, Lie(x.lie.axis, list(dims).index(x.lie.dim), x.lie.split))

    return rule


def _swapped(args: Args, kwargs: Kwargs, ndim: int) -> Sequence[int] | None:
    given = [*args[1:], *kwargs.values()]
    if len(given) != 2 or not all(isinstance(d, int) for d in given):
        return None
    order = list(range(ndim))
    a, b = (d % ndim for d in given)
    order[a], order[b] = order[b], order[a]
    return order


def _permuted(args: Args, kwargs: Kwargs, ndim: int) -> Sequence[int] | None:
    dims = kwargs.get("dims", args[1:])
    if len(dims) == 1 and not isinstance(dims[0], int):
        dims = dims[0]
    return [d % ndim for d in dims] if len(dims) == ndim else None


def _last_two(args: Args, kwargs: Kwargs, ndim: int) -> Sequence[int] | None:
    return [*range(ndim - 2), ndim - 1, ndim - 2] if ndim >= 2 else None


def expand(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """New dims in front, and dims of size 1 made longer; the divided dim stays."""
    x = args[0]
    sizes = args[1:]
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = tuple(sizes[0])
    if not isinstance(x, SplitTensor) or not sizes or kwargs or not _is_shape(sizes):
        return NotImplemented
    dim = len(sizes) - (_ndim(x) - x.lie.dim)
    if dim < 0 or sizes[dim] not in (-1, x.lie.split.size):
        return NotImplemented
    local = [*sizes[:dim], x.lie.local_size, *sizes[dim + 1 :]]
    return split_tensor(without_answers(x).expand(*local), Lie(x.lie.axis, dim, x.lie.split))


def unsqueeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A new dim of size 1."""
    x, dim = (*args, *kwargs.values())[:2]
    if not isinstance(x, SplitTensor):
        return NotImplemented
    dim = dim % (_ndim(x) + 1)
    moved = x.lie.dim + (dim <= x.lie.dim)
    return split_tensor(without_answers(x).unsqueeze(dim), Lie(x.lie.axis, moved, x.lie.split))


def squeeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """One named dim of size 1 that is not the divided one."""
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(x, SplitTensor) or not isinstance(dim, int) or dim % _ndim(x) == x.lie.dim:
        return NotImplemented
    shape, dim = whole_shape(x), dim % _ndim(x)
    if shape[dim] != 1:
        return x
    moved = x.lie.dim - (dim < x.lie.dim)
    return split_tensor(without_answers(x).squeeze(dim), Lie(x.lie.axis, moved, x.lie.split))


def getitem(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Slices and numbers on other dims; on the divided dim all of it, or one of its blocks."""
    x, index = args
    if not isinstance(x, SplitTensor):
        return NotImplemented
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not (i is None or i is Ellipsis or isinstance(i, (int, slice))) or isinstance(i, bool) for i in items):
        return NotImplemented
    shape = whole_shape(x)
    taken = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    place = items.index(Ellipsis)
    items[place : place + 1] = [slice(None)] * (len(shape) - taken)
    dim, moved, split = 0, 0, None
    for position, item in enumerate(items):
        if item is None:
            moved += 1
            continue
        if dim == x.lie.dim:
            found = _block_of(item, x.lie) if isinstance(item, slice) else None
            if found is None:
                return NotImplemented
            items[position], split = found
            out_dim = moved
        dim += 1
        moved += isinstance(item, slice)
    assert split is not None
    return split_tensor(without_answers(x)[tuple(items)], Lie(x.lie.axis, out_dim, split))


def _block_of(item: slice, lie: Lie) -> tuple[slice, Split] | None:
    """The local slice, and how it lies, of a slice over the whole dim or over one of its blocks."""
    start, stop, step = item.indices(lie.split.size)
    if step != 1:
        return None
    if (start, stop) == (0, lie.split.size):
        return slice(None), lie.split
    edge = before = 0
    for number, size in enumerate(lie.split.blocks):
        run = lie.split.parts[lie.axis.rank][number]
        width = run[1] - run[0]
        if (start, stop) == (edge, edge + size):
            return slice(before, before + width), lie.split.block(number)
        edge, before = edge + size, before + width
    return None


def narrow(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`narrow` in terms of `getitem`."""
    x, dim, start, length = (*args, *kwargs.values())[:4]
    if not isinstance(x, SplitTensor) or not all(isinstance(v, int) for v in (dim, start, length)):
        return NotImplemented
    index = [slice(None)] * _ndim(x)
    index[dim] = slice(start, start + length)
    return getitem(func, (x, tuple(index)), {})


def pieces(sections: Callable[[Any, int], list[int] | None]) -> Rule:
    """`split` and `chunk`: along another dim, or block by block."""

    def rule(func: Any, args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        named = [v for k, v in kwargs.items() if k != "dim"]
        amount = args[1] if len(args) > 1 else (named[0] if named else None)
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        if not isinstance(x, SplitTensor) or amount is None:
            return NotImplemented
        dim = dim % _ndim(x)
        if dim != x.lie.dim:
            parts = func(without_answers(x), amount, dim)
            return tuple(split_tensor(part, x.lie) for part in parts)
        sizes = sections(amount, x.lie.split.size)
        if sizes is None or tuple(sizes) != x.lie.split.blocks:
            return NotImplemented
        widths = [stop - start for start, stop in x.lie.split.parts[x.lie.axis.rank]]
        parts = torch.split(without_answers(x), widths, dim)
        return tuple(
            split_tensor(part, Lie(x.lie.axis, dim, x.lie.split.block(number))) for number, part in enumerate(parts)
        )

    return rule


def _by_size(amount: Any, size: int) -> list[int] | None:
    if isinstance(amount, int):
        return [min(amount, size - start) for start in range(0, size, amount)]
    return list(amount) if _is_shape(amount) else None


def _by_number(amount: Any, size: int) -> list[int] | None:
    return _by_size(-(-size // amount), size) if isinstance(amount, int) and amount > 0 else None


def unbind(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Along another dim."""
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not isinstance(x, SplitTensor) or dim % _ndim(x) == x.lie.dim:
        return NotImplemented
    dim = dim % _ndim(x)
    lie = Lie(x.lie.axis, x.lie.dim - (dim < x.lie.dim), x.lie.split)
    return tuple(split_tensor(part, lie) for part in without_answers(x).unbind(dim))


def joining(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`cat` along another dim, of tensors that lie alike (whole ones are cut to match)."""
    tensors = args[0] if args else kwargs["tensors"]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    tensors = [t for t in tensors if t.shape != (0,)]  # torch ignores these: a cache begins with one
    first = _first_split((tuple(tensors),), {})
    ndim = _ndim(first)
    if not isinstance(dim, int) or dim % ndim == first.lie.dim:
        return NotImplemented
    parts = []
    for tensor in tensors:
        if _ndim(tensor) != ndim or (not isinstance(tensor, SplitTensor) and tensor.shape[first.lie.dim] == 1):
            return NotImplemented
        part = _matched(tensor, first.lie, ndim - first.lie.dim)
        if part is None:
            return NotImplemented
        parts.append(part)
    return split_tensor(func(parts, dim), first.lie)


def repeat_interleave(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Every index several times over: of another dim, or of the divided one, which stays divided alike."""
    x, repeats = args[:2]
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if not isinstance(x, SplitTensor) or not isinstance(repeats, int) or not isinstance(dim, int):
        return NotImplemented
    split = x.lie.split.times(repeats) if dim % _ndim(x) == x.lie.dim else x.lie.split
    return split_tensor(without_answers(x).repeat_interleave(repeats, dim), Lie(x.lie.axis, x.lie.dim, split))


# Products -------------------------------------------------------------------------------------------------------


def matmul(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Batches and heads side by side; rows of the left, columns of the right; or a sum over the divided dim."""
    if kwargs or len(args) != 2 or _ndim(args[0]) < 2 or _ndim(args[1]) < 2:
        return NotImplemented
    a, b = args
    first = a if isinstance(a, SplitTensor) else b
    lie, r = first.lie, _ndim(first) - first.lie.dim
    if r >= 3:
        left, right = _matched(a, lie, r), _matched(b, lie, r)
    elif r == 2 and first is a and not isinstance(b, SplitTensor):
        left, right = without_answers(a), shared(b, lie)
    elif r == 1 and first is b and not isinstance(a, SplitTensor):
        left, right = shared(a, lie), without_answers(b)
    elif r == 1 and isinstance(b, SplitTensor) and _ndim(b) - b.lie.dim == 2 and b.lie.split == lie.split:
        return pairs.total(without_answers(a) @ without_answers(b), lie.axis)
    else:
        return NotImplemented
    if left is None or right is None:
        return NotImplemented
    out = left @ right
    return split_tensor(out, Lie(lie.axis, out.ndim - r, lie.split))


def linear(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Cut weights: the layers of `layers`. Whole ones: token by token, or as a sum over divided features."""
    x, weight = (*args, *(kwargs[k] for k in ("input", "weight") if k in kwargs))[:2]
    bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
    if isinstance(weight, SplitTensor):
        if _ndim(weight) != 2:
            return NotImplemented
        layer = column_parallel if weight.lie.dim == 0 else row_parallel
        return layer(x, weight, bias, weight.lie)
    if not isinstance(x, SplitTensor):
        return NotImplemented
    lie = x.lie
    if _ndim(x) - lie.dim == 1:
        return add_bias(
            pairs.total(F.linear(without_answers(x), pairs.take(weight, lie.axis, 1, lie.split)), lie.axis), bias
        )
    bias = None if bias is None else shared(bias, lie)
    return split_tensor(F.linear(without_answers(x), shared(weight, lie), bias), lie)


def addmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``bias + x @ weight`` with a cut weight: a linear whose weight lies the other way round."""
    if kwargs or len(args) != 3 or not isinstance(args[2], CutParameter):
        return NotImplemented
    bias, x, weight = args
    lie = Lie(weight.lie.axis, 1 - weight.lie.dim, weight.lie.split)
    turned = split_tensor(without_answers(weight).t(), lie)
    turned.__dict__.update({k: v for k, v in weight.__dict__.items() if k == SEQUENCE})
    return linear(func, (x, turned, bias), {})


def embedding(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A table cut along its words, or along its features."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    ids, weight = given["input"], given["weight"]
    if not isinstance(weight, SplitTensor) or isinstance(ids, SplitTensor):
        return NotImplemented
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse"):
        return NotImplemented
    if weight.lie.dim == 0:
        return vocab_parallel_embedding(ids, weight, given.get("padding_idx"), weight.lie)
    out = F.embedding(ids, without_answers(weight), given.get("padding_idx"))
    return split_tensor(out, Lie(weight.lie.axis, out.ndim - 1, weight.lie.split))


def attention(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Scaled dot-product attention with divided heads (or batches): every rank attends with its own."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query = given["query"]
    if not isinstance(query, SplitTensor) or _ndim(query) - query.lie.dim < 3:
        return NotImplemented
    lie, r = query.lie, _ndim(query) - query.lie.dim
    if given.pop("enable_gqa", False):
        for name in ("key", "value"):
            shape = whole_shape(given[name]) if isinstance(given[name], SplitTensor) else given[name].shape
            given[name] = given[name].repeat_interleave(whole_shape(query)[-3] // shape[-3], -3)
    for name in ("query", "key", "value", "attn_mask"):
        if isinstance(given.get(name), Tensor):
            given[name] = _matched(given[name], lie, r)
            if given[name] is None:
                return NotImplemented
    if given.get("dropout_p", 0.0) > 0.0:
        with local_draws(lie.axis, given["query"].device):
            out = func(**given)
    else:
        out = func(**given)
    return split_tensor(out, Lie(lie.axis, out.ndim - r, lie.split))


def loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Cross entropy of logits that are divided along the vocabulary, without collecting them."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    logits, target = given.pop("input"), given.pop("target")
    if not isinstance(logits, SplitTensor) or isinstance(target, SplitTensor) or target.is_floating_point():
        return NotImplemented
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        return NotImplemented
    lie = logits.lie
    if lie.dim != (1 if _ndim(logits) > 1 else 0) or len(lie.split.blocks) > 1:
        return NotImplemented
    return cross_entropy(without_answers(logits).movedim(lie.dim, -1), target, lie.axis, lie.split, **given)


# Autograd -------------------------------------------------------------------------------------------------------


def backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`torch.autograd.backward`, which reentrant recompute calls with gradients of parts."""
    bound = inspect.signature(torch.autograd.backward).bind(*args, **kwargs)
    given = bound.arguments
    given["tensors"], gradients = _with_gradients(given["tensors"], given.get("grad_tensors"))
    if gradients is not None:
        given["grad_tensors"] = gradients
    with torch._C.DisableTorchFunctionSubclass():
        return func(*bound.args, **bound.kwargs)


def differentiate(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`torch.autograd.grad`: gradients lie as the inputs do."""
    bound = inspect.signature(torch.autograd.grad).bind(*args, **kwargs)
    given = bound.arguments
    inputs = (given["inputs"],) if isinstance(given["inputs"], Tensor) else tuple(given["inputs"])
    given["outputs"], gradients = _with_gradients(given["outputs"], given.get("grad_outputs"))
    if gradients is not None:
        given["grad_outputs"] = gradients
    given["inputs"] = inputs
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*bound.args, **bound.kwargs)
    return tuple(
        split_tensor(gradient, x.lie) if isinstance(x, SplitTensor) and gradient is not None else gradient
        for x, gradient in zip(inputs, found, strict=True)
    )


def _with_gradients(tensors: Any, gradients: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...] | None]:
    """The tensors, which are parts where none asks, and the parts of their gradients, which may be whole."""
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    if gradients is None:
        return tensors, None
    gradients = (gradients,) if isinstance(gradients, Tensor) else tuple(gradients)
    own = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if isinstance(gradient, SplitTensor):
            gradient = without_answers(gradient) if isinstance(tensor, SplitTensor) else whole(gradient)
        elif isinstance(tensor, SplitTensor) and gradient is not None and tuple(gradient.shape) == whole_shape(tensor):
            gradient = part_of(gradient, tensor.lie.dim, tensor.lie.split, tensor.lie.axis.rank)
        own.append(gradient)
    return tensors, tuple(own)


# The table ------------------------------------------------------------------------------------------------------

_UNARY = """
    abs neg exp log log2 log1p sqrt rsqrt square reciprocal sin cos tanh sigmoid erf relu sign floor ceil round
    clamp clip nan_to_num isnan isfinite isinf logical_not
"""
_BINARY = """
    add sub mul div true_divide floor_divide pow remainder maximum minimum where masked_fill lerp addcmul addcdiv
    eq ne lt le gt ge logical_and logical_or bitwise_and bitwise_or atan2 fmod subtract multiply divide
"""
_METHODS = """
    float double half bfloat16 clone contiguous bool int long type __add__ __radd__ __sub__ __rsub__
    __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    __and__ __or__ __invert__ __floordiv__ __mod__ cpu cuda
"""
_IN_PLACE = """
    add_ sub_ mul_ div_ pow_ clamp_ neg_ exp_ tanh_ relu_ sigmoid_ masked_fill_ copy_ zero_ fill_ __iadd__ __isub__
    __imul__ __itruediv__ sqrt_ rsqrt_ square_ abs_
"""
_ACTIVATIONS = "gelu silu relu elu selu leaky_relu softplus mish hardswish hardtanh relu6 celu logsigmoid softsign"
_REDUCTIONS = "sum mean amax amin var std prod any all logsumexp argmax argmin max min sort"


def _functions(names: str, *homes: Any) -> list[Any]:
    found = [getattr(home, name) for name in names.split() for home in homes if hasattr(home, name)]
    return [function for function in found if callable(function)]


def _table() -> dict[Any, Rule]:
    table: dict[Any, Rule] = {}

    def enter(rule: Rule, *functions: Any) -> None:
        table.update(dict.fromkeys(functions, rule))

    enter(elementwise, *_functions(_UNARY + _BINARY, torch, Tensor), *_functions(_METHODS, Tensor))
    enter(elementwise, *_functions(_ACTIVATIONS + " tanh sigmoid", F), torch.zeros_like, torch.ones_like)
    enter(elementwise, torch.empty_like, torch.full_like, torch.special.expit)
    enter(in_place, *_functions(_IN_PLACE, Tensor))
    enter(data_of, _DATA, Tensor.detach, torch.detach)
    enter(casting, Tensor.to, Tensor.type_as)
    enter(set_data, vars(torch._C.TensorBase)["data"].__set__)
    enter(dropping, F.dropout, torch.dropout, F.alpha_dropout)
    enter(drawing, torch.rand_like, torch.randn_like)
    enter(hooking, Tensor.register_hook)
    enter(reduction(1), *_functions(_REDUCTIONS, torch, Tensor))
    enter(reduction(2), *_functions("norm topk", torch, Tensor), torch.linalg.vector_norm)
    enter(along(1), torch.softmax, Tensor.softmax, F.softmax, torch.log_softmax, Tensor.log_softmax, F.log_softmax)
    enter(along(1), torch.cumsum, Tensor.cumsum)
    enter(along(2, 1), F.normalize)
    enter(normalization, F.layer_norm, *_functions("rms_norm", F, torch), torch.layer_norm)
    enter(reshape, Tensor.view, Tensor.reshape, torch.reshape)
    enter(flatten, Tensor.flatten, torch.flatten)
    enter(unflatten, Tensor.unflatten, torch.unflatten)
    enter(permutation(_swapped), *_functions("transpose swapaxes swapdims", torch, Tensor))
    enter(permutation(_permuted), Tensor.permute, torch.permute)
    enter(permutation(_last_two), getattr(Tensor, "mT").__get__)  # noqa: B009 (a descriptor)
    enter(expand, Tensor.expand)
    enter(unsqueeze, Tensor.unsqueeze, torch.unsqueeze)
    enter(squeeze, Tensor.squeeze, torch.squeeze)
    enter(getitem, Tensor.__getitem__)
    enter(narrow, Tensor.narrow, torch.narrow)
    enter(pieces(_by_size), Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes)
    enter(pieces(_by_number), Tensor.chunk, torch.chunk)
    enter(unbind, Tensor.unbind, torch.unbind)
    enter(joining, *_functions("cat concat concatenate", torch))
    enter(repeat_interleave, torch.repeat_interleave, Tensor.repeat_interleave)
    enter(matmul, *_functions("matmul bmm __matmul__", torch, Tensor))
    enter(linear, F.linear)
    enter(addmm, torch.addmm)
    enter(embedding, F.embedding)
    enter(attention, F.scaled_dot_product_attention)
    enter(loss, F.cross_entropy)
    enter(backward, torch.autograd.backward)
    enter(differentiate, torch.autograd.grad)
    enter(multi_head, F.multi_head_attention_forward)
    return table


RULES.update(_table())
