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
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_dist.comm import pairs
from lightning_dist.comm.mesh import Axis
from lightning_dist.comm.rollcall import Place
from lightning_dist.core.errors import UnsupportedModelError
from lightning_dist.core.split import Split
from lightning_dist.params.questions import QUESTIONS, SHAPE_QUESTIONS, without_answers
from lightning_dist.tensor.compiled import refuse_tracing

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
        refuse_tracing()
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
        for arg in args:
            if isinstance(arg, SplitTensor):
                _show_gradients(arg)
        rule = RULES.get(func)
        if rule is not None and kwargs.get("out") is None:
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


def in_whole(value: Any) -> Any:
    """A value with its parts put together if it is a tensor of which ranks hold parts, anything else as it is."""
    return whole(value) if isinstance(value, SplitTensor) else value


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
    """Compute on whole tensors, on all ranks alike; what the function writes into them goes to the parts."""
    first = args[0] if args else None
    if func in _FREE and isinstance(first, SplitTensor):
        return func(without_answers(first), *args[1:], **kwargs)
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    sources = {id(leaf): leaf for leaf in leaves if isinstance(leaf, SplitTensor)}
    some = next(iter(sources.values()))
    name = getattr(func, "__name__", str(func))
    _announce(list(sources.values()), name)
    targets = written_by(func, args, kwargs)
    if not targets:
        _mention(name, some)
    wholes = {key: whole(source) for key, source in sources.items()}
    versions = {key: _version(values) for key, values in wholes.items()}
    plain_args, plain_kwargs = pytree.tree_unflatten([wholes.get(id(leaf), leaf) for leaf in leaves], spec)
    result = func(*plain_args, **plain_kwargs)
    written = {
        id(wholes[key]): source
        for key, source in sources.items()
        if versions[key] != _version(wholes[key]) or any(target is source for target in targets)
    }
    for key, source in sources.items():
        if id(wholes[key]) in written:
            _write(source, wholes[key], name)
    result = pytree.tree_map(lambda leaf: written.get(id(leaf), leaf), result)
    for key, source in sources.items():
        result = seen_through(result, Collected(wholes[key], source, _version(source)))
    return result


def _announce(parts: Sequence[SplitTensor], function: str) -> None:
    """Perhaps only some ranks are about to collect parts, or each of them those of another tensor."""
    rollcall = parts[0].lie.axis.rollcall
    if rollcall is not None:
        said = [(_name_of(part), whole_shape(part)) for part in parts]
        words = ", ".join(f"{name} {list(shape)}" for name, shape in said)
        rollcall.call(Place.READ, zlib.crc32(f"{function} {said}".encode()), what=f"for {function} of {words}")


def _name_of(part: SplitTensor) -> str:
    """Of a parameter; views of one are known by their memory, which an empty part does not have on every rank."""
    name: str = part.__dict__.get(WRITABLE, "a parameter") if isinstance(part, torch.nn.Parameter) else "a tensor"
    return name


def _show_gradients(tensor: SplitTensor) -> None:
    """What an autograd function of the user's made: its backward shall see gradients as its forward saw tensors.

    Autograd would hand it this rank's part of them as a plain tensor, and expects parts of what went in divided. (What
    rules make is an alias of what a function of ours has made: whose own history is a Python function is not ours.)
    """
    node: Any = tensor.grad_fn
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return
    lies: dict[int, Lie] | None = node.__dict__.get(SEEN)
    if lies is not None:
        lies[tensor.output_nr] = tensor.lie
        return
    lies = node.__dict__.setdefault(SEEN, {tensor.output_nr: tensor.lie})
    made = weakref.ref(node)  # a node that held itself would outlive its graph

    def apply(*gradients: Tensor | None) -> Any:
        node: Any = made()
        shown = [
            split_tensor(gradient, lies[number]) if number in lies and gradient is not None else gradient
            for number, gradient in enumerate(gradients)
        ]
        returned = type(node).apply(node, *shown)
        several = returned if isinstance(returned, tuple) else (returned,)
        edges = iter([edge for edge in node.next_functions if edge[0] is not None])
        wanted = [next(edges) if needed else None for needed in node.needs_input_grad]
        several = tuple(
            gradient
            if gradient is None or edge is None
            else _of_shape(gradient, tuple(edge[0]._input_metadata[edge[1]].shape), lies.values())
            for gradient, edge in zip(several, (*wanted, *[None] * len(several)), strict=False)
        )
        return several if isinstance(returned, tuple) else several[0]

    node.__dict__["apply"] = apply


def _of_shape(gradient: Tensor, shape: tuple[int, ...], lies: Iterable[Lie]) -> Tensor:
    """A gradient as the tensor of this rank wants it: its part where that is divided, else the whole."""
    if isinstance(gradient, SplitTensor):
        own = without_answers(gradient)
        return whole(gradient) if own.shape != shape and whole_shape(gradient) == shape else own
    for lie in lies:
        expected = (*shape[: lie.dim], lie.split.size, *shape[lie.dim + 1 :])
        if gradient.shape != shape and gradient.shape == expected and shape[lie.dim] == lie.local_size:
            return pairs.take(gradient, lie.axis, lie.dim, lie.split)
    return gradient


SEEN = "_lightning_dist_seen"
"""Attribute of the node of a user's autograd function: how its outputs lie, by number."""


def writes(name: str) -> bool:
    """Whether a function of this name changes its first operand."""
    return name in _COMPOUND or (name.endswith("_") and not name.endswith("__"))


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call says it writes into: its first operand or the tensors of that list, and `out`."""
    into = args[:1] if writes(getattr(func, "__name__", "")) or kwargs.get("inplace") is True else ()
    return [leaf for leaf in pytree.tree_leaves((into, kwargs.get("out"))) if isinstance(leaf, Tensor)]


def _version(tensor: Tensor) -> int:
    """How often a tensor was written into; tensors of inference mode do not count it."""
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if tensor.is_inference() else tensor._version


def _write(target: SplitTensor, values: Tensor, name: str = "a write") -> None:
    """This rank's part of the values into the part that it holds."""
    if tuple(values.shape) != whole_shape(target):
        raise UnsupportedModelError(
            f"{name} would change the shape {whole_shape(target)} of a tensor that ranks hold in parts into "
            f"{tuple(values.shape)}; assign what it returns to a new tensor, or change the shape before training"
        )
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
"""Attribute of the parts of parameters, and of what shares their memory: writes through views of them must arrive.

Its value is the parameter's name, the same on all ranks.
"""


@dataclass(eq=False)
class Collected:
    """The whole `values` that were collected from the parts of `source`, when that was at `version`."""

    values: Tensor
    source: SplitTensor
    version: int

    def follow(self, *, surely: bool) -> None:
        """Take over what was written into the source meanwhile; `surely` also where versions do not tell (`data`)."""
        if self.version != _version(self.source) or (surely and WRITABLE in self.source.__dict__):
            _announce([self.source], "a view")
            self.values.copy_(whole(self.source))
            self.version = _version(self.source)

    def write_back(self) -> None:
        """The source gets the values."""
        _write(self.source, self.values)
        self.version = _version(self.source)


class View(Tensor):
    """A view of a whole that was collected from parts: what is written into it goes to the parts.

    So ``weight.data[padding_idx].zero_()`` and ``scores.diagonal().fill_(0)`` mean what they mean for plain tensors.
    """

    collected: Collected

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As of a plain tensor; after a write the parts are written too, and a view of a view is one."""
        kwargs = kwargs or {}
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        views = {id(leaf): leaf for leaf in leaves if isinstance(leaf, View)}
        targets = {id(target) for target in written_by(func, args, kwargs)}
        if len({id(view.collected) for key, view in views.items() if key in targets}) > 1:
            return _one_by_one(func, args, kwargs)
        if func not in QUESTIONS and func not in SHAPE_QUESTIONS:
            for key, view in views.items():
                view.collected.follow(surely=key in targets)
        plain = {key: without_answers(view) for key, view in views.items()}
        versions = {key: _version(tensor) for key, tensor in plain.items()}
        plain_args, plain_kwargs = pytree.tree_unflatten([plain.get(id(leaf), leaf) for leaf in leaves], spec)
        result = func(*plain_args, **plain_kwargs)
        written = [key for key in views if key in targets or versions[key] != _version(plain[key])]
        for key in written:
            views[key].collected.write_back()
        same = {id(plain[key]): views[key] for key in written}
        result = pytree.tree_map(lambda leaf: same.get(id(leaf), leaf), result)
        for view in views.values():
            result = seen_through(result, view.collected)
        return result


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A list of views that were collected each for itself: the second would overwrite what the first has written."""
    name = func.__name__
    if not name.startswith("_foreach_"):
        raise UnsupportedModelError(
            f"{name} would write into several views of tensors that ranks hold in parts; call it for each of them"
        )

    def row(value: Any, index: int) -> Any:
        return [value[index]] if isinstance(value, (list, tuple)) else value

    for index in range(len(args[0])):
        func(*(row(arg, index) for arg in args), **{key: row(value, index) for key, value in kwargs.items()})
    return args[0]


def _still_writable(args: tuple[Any, ...], result: Any) -> None:
    """What a rule made of a parameter's part shares its memory, or does not."""
    first = args[0] if args else None
    if isinstance(first, SplitTensor) and WRITABLE in first.__dict__:
        for view in result if isinstance(result, tuple) else (result,):
            if isinstance(view, SplitTensor) and view is not first and _same_memory(view, first):
                view.__dict__[WRITABLE] = first.__dict__[WRITABLE]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def seen_through(result: Any, collected: Collected) -> Any:
    """`result` itself, or a `View` where it lies in the memory of what was collected.

    A NumPy array over that memory may be read only: what is written into one cannot be seen.
    """
    if isinstance(result, np.ndarray) and WRITABLE in collected.source.__dict__:
        result.flags.writeable = False
    if type(result) in (tuple, list):
        return type(result)(seen_through(piece, collected) for piece in result)
    if not isinstance(result, Tensor) or isinstance(result, (SplitTensor, View)) or result.layout is not torch.strided:
        return result
    if not result.numel() or not _same_memory(result, collected.values):
        return result
    view = result.as_subclass(View)
    view.collected = collected
    return view
