"""Views, splits and joins: where the parts lie afterwards."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_dist.core.split import Split
from lightning_dist.params.questions import without_answers
from lightning_dist.tensor.rules.operands import Args, Kwargs, Rule, first_split, matched, named, ndim_of
from lightning_dist.tensor.split_tensor import Lie, SplitTensor, split_tensor, whole_shape


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


def like_other(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`view_as` and `reshape_as` in terms of `reshape`; `expand_as` in terms of `expand`."""
    x, other = named(args, kwargs, "input", "other")
    if not isinstance(x, SplitTensor):
        return NotImplemented
    shape = whole_shape(other) if isinstance(other, SplitTensor) else tuple(other.shape)
    if func is Tensor.expand_as:
        return expand(Tensor.expand, (x, *shape), {})
    return reshape(Tensor.reshape, (x, *shape), {})


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
    x, dim, sizes = named(args, kwargs, "input", "dim", "sizes")
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
        dims = order(args, kwargs, ndim_of(x)) if isinstance(x, SplitTensor) else None
        if dims is None:
            return NotImplemented
        part = without_answers(x).permute(*dims)
        return split_tensor(part, Lie(x.lie.axis, list(dims).index(x.lie.dim), x.lie.split))

    return rule


def swapped(args: Args, kwargs: Kwargs, ndim: int) -> Sequence[int] | None:
    given = [*args[1:], *kwargs.values()]
    if len(given) != 2 or not all(isinstance(d, int) for d in given):
        return None
    order = list(range(ndim))
    a, b = (d % ndim for d in given)
    order[a], order[b] = order[b], order[a]
    return order


def permuted(args: Args, kwargs: Kwargs, ndim: int) -> Sequence[int] | None:
    dims = kwargs.get("dims", args[1:])
    if len(dims) == 1 and not isinstance(dims[0], int):
        dims = dims[0]
    return [d % ndim for d in dims] if len(dims) == ndim else None


def last_two(args: Args, kwargs: Kwargs, ndim: int) -> Sequence[int] | None:
    return [*range(ndim - 2), ndim - 1, ndim - 2] if ndim >= 2 else None


def expand(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """New dims in front, and dims of size 1 made longer; the divided dim stays."""
    x = args[0]
    sizes = args[1:]
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = tuple(sizes[0])
    if not isinstance(x, SplitTensor) or not sizes or kwargs or not _is_shape(sizes):
        return NotImplemented
    dim = len(sizes) - (ndim_of(x) - x.lie.dim)
    if dim < 0 or sizes[dim] not in (-1, x.lie.split.size):
        return NotImplemented
    local = [*sizes[:dim], x.lie.local_size, *sizes[dim + 1 :]]
    return split_tensor(without_answers(x).expand(*local), Lie(x.lie.axis, dim, x.lie.split))


def unsqueeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A new dim of size 1."""
    x, dim = named(args, kwargs, "input", "dim")
    if not isinstance(x, SplitTensor) or not isinstance(dim, int):
        return NotImplemented
    dim = dim % (ndim_of(x) + 1)
    moved = x.lie.dim + (dim <= x.lie.dim)
    return split_tensor(without_answers(x).unsqueeze(dim), Lie(x.lie.axis, moved, x.lie.split))


def squeeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """One named dim of size 1 that is not the divided one."""
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(x, SplitTensor) or not isinstance(dim, int) or dim % ndim_of(x) == x.lie.dim:
        return NotImplemented
    shape, dim = whole_shape(x), dim % ndim_of(x)
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
    x, dim, start, length = named(args, kwargs, "input", "dim", "start", "length")
    if not isinstance(x, SplitTensor) or not all(isinstance(v, int) for v in (dim, start, length)):
        return NotImplemented
    index = [slice(None)] * ndim_of(x)
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
        dim = dim % ndim_of(x)
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


def by_size(amount: Any, size: int) -> list[int] | None:
    if isinstance(amount, int):
        return [min(amount, size - start) for start in range(0, size, amount)]
    return list(amount) if _is_shape(amount) else None


def by_number(amount: Any, size: int) -> list[int] | None:
    return by_size(-(-size // amount), size) if isinstance(amount, int) and amount > 0 else None


def unbind(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Along another dim."""
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not isinstance(x, SplitTensor) or dim % ndim_of(x) == x.lie.dim:
        return NotImplemented
    dim = dim % ndim_of(x)
    lie = Lie(x.lie.axis, x.lie.dim - (dim < x.lie.dim), x.lie.split)
    return tuple(split_tensor(part, lie) for part in without_answers(x).unbind(dim))


def joining(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`cat` along another dim, of tensors that lie alike (whole ones are cut to match)."""
    tensors = args[0] if args else kwargs["tensors"]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    tensors = [t for t in tensors if t.shape != (0,)]  # torch ignores these: a cache begins with one
    first = first_split((tuple(tensors),), {})
    ndim = ndim_of(first)
    if not isinstance(dim, int) or dim % ndim == first.lie.dim:
        return NotImplemented
    parts = []
    for tensor in tensors:
        if ndim_of(tensor) != ndim or (not isinstance(tensor, SplitTensor) and tensor.shape[first.lie.dim] == 1):
            return NotImplemented
        part = matched(tensor, first.lie, ndim - first.lie.dim)
        if part is None:
            return NotImplemented
        parts.append(part)
    return split_tensor(func(parts, dim), first.lie)


def repeat_interleave(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Every index several times over: of another dim, or of the divided one, which stays divided alike."""
    x, repeats, dim = named(args, kwargs, "input", "repeats", "dim")
    if not isinstance(x, SplitTensor) or not isinstance(repeats, int) or not isinstance(dim, int):
        return NotImplemented
    split = x.lie.split.times(repeats) if dim % ndim_of(x) == x.lie.dim else x.lie.split
    return split_tensor(without_answers(x).repeat_interleave(repeats, dim), Lie(x.lie.axis, x.lie.dim, split))
