"""`SplitTensor`: what user code sees of a tensor of which every rank holds a part.

A column-parallel layer leaves its output features on different ranks. The code behind it was written for all of them:
it views them as heads, transposes, computes scores, splits a fused projection. A `SplitTensor` keeps what that code may
know true (the shape is the whole one), carries every operation through that can be done on the parts, and remembers
along which dim they lie::

    q = self.q_proj(x)                     (b, s, h)    split along dim 2
    q = q.view(b, s, heads, h // heads)    (b, s, n, d) split along dim 2, in units of d
    q = q.transpose(1, 2)                  (b, n, s, d) split along dim 1
    scores = q @ k.transpose(2, 3)         (b, n, s, s) split along dim 1, each rank its heads
    print(scores.max())                    gathered: the same number on every rank

An operation without a rule (see `rules`) collects the parts and is computed on the whole by all ranks: slower, never
wrong. Sequence parallelism is the same object, split along the sequence; logits are the same object, split along the
vocabulary.

Gradients need no care elsewhere. Where a tensor that all ranks hold alike meets parts, it is either cut to match (its
gradient is gathered) or used by each rank with other data (its gradient is summed): `comm.pairs` has both. So whatever
all ranks hold alike gets the whole gradient, the same on all of them.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_dist.comm import pairs
from lightning_dist.comm.mesh import Axis
from lightning_dist.comm.rollcall import Place
from lightning_dist.core.split import Split
from lightning_dist.params.questions import QUESTIONS, SHAPE_QUESTIONS, without_answers

RULES: dict[object, Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]] = {}
"""From torch functions to what they do with parts; `rules` fills it."""


@dataclass(frozen=True)
class Lie:
    """How the parts lie: `split` of dim `dim` over the ranks of `axis`."""

    axis: Axis
    dim: int
    split: Split

    @property
    def local_size(self) -> int:
        """Indices that this rank holds."""
        return self.split.sizes[self.axis.rank]


class SplitTensor(Tensor):
    """See the module docstring. Its own values are this rank's part; `lie` says which."""

    lie: Lie

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer questions, carry operations through by their rule, else compute on the whole."""
        kwargs = kwargs or {}
        if func in QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if kwargs:
            args, kwargs = _in_usual_words(args, kwargs)
        if func in SHAPE_QUESTIONS and isinstance(args[0], SplitTensor):
            return SHAPE_QUESTIONS[func](whole_shape(args[0]), *args[1:], **kwargs)
        if any(kind not in (Tensor, torch.nn.Parameter) and not issubclass(kind, cls) for kind in types):
            return NotImplemented  # a cut or released parameter brings its values first
        rule = RULES.get(func)
        if rule is not None:
            result = rule(func, args, kwargs)
            if result is not NotImplemented:
                _still_writable(args, result)
                return result
        return on_the_whole(func, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Printing must not communicate: often only one rank prints."""
        lie = self.lie
        part = without_answers(self).detach()
        return f"SplitTensor(shape={whole_shape(self)}, split along dim {lie.dim} over {lie.axis.name}; here: {part})"

    def __deepcopy__(self, memo: Any) -> "SplitTensor":
        """A copy of this rank's part."""
        return split_tensor(without_answers(self).detach().clone(), self.lie)


def split_tensor(part: Tensor, lie: Lie) -> "SplitTensor":
    """A tensor of which this rank holds `part`, in the same graph."""
    tensor = part.as_subclass(SplitTensor)
    tensor.lie = lie
    return tensor


def whole_shape(tensor: SplitTensor) -> tuple[int, ...]:
    """The shape that user code sees."""
    with torch._C.DisableTorchFunctionSubclass():
        shape = list(tensor.shape)
    shape[tensor.lie.dim] = tensor.lie.split.size
    return tuple(shape)


def whole(tensor: SplitTensor) -> Tensor:
    """All parts put together, the same on every rank, to be used alike by all of them."""
    lie = tensor.lie
    return pairs.collect(without_answers(tensor), lie.axis, lie.dim, lie.split)


_ALIASES = {"axis": "dim", "keepdims": "keepdim"}
_FIRST = ("input", "tensor")


def _in_usual_words(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """NumPy's names, which torch takes too, as torch's; a first operand that is given by name in its place."""
    if not _ALIASES.keys().isdisjoint(kwargs):
        kwargs = {_ALIASES.get(name, name): value for name, value in kwargs.items()}
    if not args:
        name = next((name for name in _FIRST if isinstance(kwargs.get(name), Tensor)), None)
        if name is not None:
            args, kwargs = (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}
    return args, kwargs


_FREE = {torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty, torch.Tensor.new_full}
_FREE |= {torch.Tensor.new_tensor}
"""Functions that take no more than dtype and device from the tensor."""


_COMPOUND = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_COMPOUND.add("__setitem__")


def on_the_whole(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute on whole tensors, on all ranks alike."""
    first = args[0] if args else None
    if func in _FREE and isinstance(first, SplitTensor):
        return func(without_answers(first), *args[1:], **kwargs)
    parts = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SplitTensor)]
    name = getattr(func, "__name__", str(func))
    axis = parts[0].lie.axis
    if axis.rollcall is not None:
        axis.rollcall.call(Place.READ, what=f"for {name}")
    out = kwargs.get("out")
    if isinstance(out, SplitTensor):
        copy = whole(out).detach().clone()
        func(*args, **{**kwargs, "out": copy})
        _write(out, copy)
        return out
    if writes(name) and isinstance(first, SplitTensor):
        return _in_place(func, args, kwargs)
    _mention(name, parts[0])
    args, kwargs = pytree.tree_map(lambda leaf: whole(leaf) if isinstance(leaf, SplitTensor) else leaf, (args, kwargs))
    result = func(*args, **kwargs)
    if isinstance(first, SplitTensor) and WRITABLE in first.__dict__:
        return seen_through(result, args[0], first)
    return result


def writes(name: str) -> bool:
    """Whether a function of this name changes its first operand."""
    return name in _COMPOUND or (name.endswith("_") and not name.endswith("__"))


def _in_place(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Write through the whole tensor into this rank's part."""
    target: SplitTensor = args[0]
    copy = whole(target).clone()
    result = func(copy, *args[1:], **kwargs)
    _write(target, copy)
    return None if result is None else target


def _write(target: SplitTensor, values: Tensor) -> None:
    lie = target.lie
    with torch._C.DisableTorchFunctionSubclass():
        target.copy_(pairs.take(values, lie.axis, lie.dim, lie.split))


def _mention(name: str, tensor: SplitTensor) -> None:
    """Large gathers are worth a word: they cost time, and perhaps memory. Python shows the same words once."""
    if tensor.numel() >= 1 << 20:
        warnings.warn(
            f"{name} of a tensor that is split along dim {tensor.lie.dim} of {len(whole_shape(tensor))} over "
            f"{tensor.lie.axis.name}: its parts are collected for it on every rank",
            stacklevel=5,
        )


WRITABLE = "_lightning_dist_writable"
"""Attribute of the parts of parameters, and of what shares their memory: writes through views of them must arrive."""


class View(Tensor):
    """A view of a whole that was collected from a parameter's parts: what is written into it goes to the parts.

    So ``weight.data[padding_idx].zero_()`` and ``weight.view(-1)[:3] = 0`` mean what they mean for a plain parameter.
    """

    collected: Tensor
    source: SplitTensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As of a plain tensor; after a write the parts are written too, and a view of a view is one."""
        args, kwargs = args, kwargs or {}
        first = args[0] if args else None
        plain_args, plain_kwargs = pytree.tree_map(
            lambda leaf: without_answers(leaf) if isinstance(leaf, View) else leaf, (args, kwargs)
        )
        result = func(*plain_args, **plain_kwargs)
        if not isinstance(first, View):
            return result
        if writes(getattr(func, "__name__", "")):
            _write(first.source, first.collected)
            return None if result is None else first
        return seen_through(result, first.collected, first.source)


def _still_writable(args: tuple[Any, ...], result: Any) -> None:
    """What a rule made of a parameter's part shares its memory, or does not."""
    first = args[0] if args else None
    if isinstance(first, SplitTensor) and WRITABLE in first.__dict__:
        for view in result if isinstance(result, tuple) else (result,):
            if isinstance(view, SplitTensor) and view is not first and _same_memory(view, first):
                view.__dict__[WRITABLE] = True


def _same_memory(a: Tensor, b: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def seen_through(result: Any, collected: Tensor, source: SplitTensor) -> Any:
    """`result` itself, or a `View` where it lies in the memory of `collected`, the whole of `source`."""
    if type(result) in (tuple, list):
        return type(result)(seen_through(piece, collected, source) for piece in result)
    if not isinstance(result, Tensor) or isinstance(result, SplitTensor) or not result.numel():
        return result
    if (torch.is_grad_enabled() and result.requires_grad) or not _same_memory(result, collected):
        return result
    view = result.as_subclass(View)
    view.collected, view.source = collected, source
    return view
