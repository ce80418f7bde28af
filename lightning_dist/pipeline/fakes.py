"""Fake tensors: what a stage sees in place of values that are computed on other stages.

A fake tensor has shape, dtype and device and no values (torch's `FakeTensor`). What follows from one is fake too, at
the cost of a dispatch and no arithmetic. So ahead of its own layers a stage runs the user's code as it is, and at the
entry of its first layer exactly those arguments are fake that must come from elsewhere: the hidden state, and whatever
else the layers read that the batch alone does not determine (an encoder's output, a learned bias of positions).

Behind the chain a fake must not be touched: something left the chain by a side door (a skip connection, the states of
all layers for an auxiliary loss), and a loss computed from it would have no value. It is refused with its origin.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_dist.core.errors import UnsupportedModelError
from lightning_dist.core.shard import cut_of
from lightning_dist.params.questions import seen_shape

_ORIGIN = "_lightning_dist_origin"
_FROM = "what was computed from "


class Fakes:
    """The fake tensors of one module. `active` while a stage runs, `behind` once the chain has been passed.

    `drawn` counts the operations that would have drawn random numbers, had they not been on fakes.
    """

    def __init__(self) -> None:
        self.mode = _Mode(self)
        self.active = False
        self.behind = False
        self.drawn = 0
        self.keeps_pace = False
        self._parameters: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def keeping_pace(self) -> Iterator[None]:
        """Within the block operations on fakes use up the random numbers that they would have used with values."""
        self.keeps_pace = True
        try:
            yield
        finally:
            self.keeps_pace = False

    def of(self, parameter: nn.Parameter, name: str) -> Tensor:
        """The fake that stands for a parameter."""
        fake = self._parameters.get(parameter)
        if fake is None:
            fake = self._parameters[parameter] = self.like(parameter, name)
        return fake

    def like(self, tensor: Tensor, origin: str, *, requires_grad: bool = False) -> Tensor:
        """A new fake with the shape, strides, dtype and device of a tensor; of a parameter that is cut, whole."""
        with torch._C.DisableTorchFunctionSubclass(), self.mode, torch.no_grad():
            if cut_of(tensor) is None:
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            else:
                fake = torch.empty(seen_shape(tensor), dtype=tensor.dtype, device=tensor.device)
        fake.requires_grad_(requires_grad)
        self.label(fake, origin)
        return fake

    def label(self, value: Any, origin: str) -> Any:
        """Note where the fakes in a structure come from, for messages."""
        for leaf in pytree.tree_leaves(value):
            if is_fake(leaf):
                setattr(leaf, _ORIGIN, origin)
        return value


def is_fake(value: object) -> bool:
    """Whether a value has no values."""
    return isinstance(value, FakeTensor)


def origin_of(fake: object) -> str:
    """Which module or parameter a fake comes from, as far as that is known."""
    return str(getattr(fake, _ORIGIN, "what is computed on another stage"))


class _AsComputed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def as_computed(tensor: Tensor) -> Tensor:
    """The same values, as if they had been computed: autograd lets nobody write in place to what starts a graph."""
    computed: Callable[[Tensor], Tensor] = _AsComputed.apply
    return computed(tensor) if tensor.requires_grad else tensor


class ValuesReadError(UnsupportedModelError):
    """User code looks at values which do not exist on this stage."""


class _Mode(FakeTensorMode):
    """Refuses to go on where a fake would make a wrong result."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fakes = fakes
        self.in_a_draw = False  # what it is made of on fakes is not a draw once more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """An operation on a fake, or within this mode."""
        if self.fakes.behind:
            raise UnsupportedModelError(_refusal(func, args, kwargs, "is used after the layers"))
        began, self.in_a_draw = self.in_a_draw, self.in_a_draw or _may_draw(func)
        try:
            if self.in_a_draw and not began and not _is_attention_without_dropout(func, args, kwargs):
                self.fakes.drawn += 1
                if self.fakes.keeps_pace:
                    _draw_as_much(func, args, kwargs or {})
            made = super().__torch_dispatch__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            if isinstance(made, FakeTensor) and not hasattr(made, _ORIGIN):
                of = next((getattr(arg, _ORIGIN) for arg in args if hasattr(arg, _ORIGIN)), None)
                if of is not None:
                    setattr(made, _ORIGIN, of if of.startswith(_FROM) else f"{_FROM}{of}")
            return made
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise ValuesReadError(_refusal(func, args, kwargs, "has its values read ahead of the layers")) from None
        finally:
            self.in_a_draw = began


_DRAWN_UNTIL_IT_FITS = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
"""How many random numbers these use up depends on values."""


@cache
def _may_draw(func: Any) -> bool:
    """Whether an operation draws random numbers; factories of fakes in our own hands do not."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_attention_without_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """Which counts as drawing, and is much work."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | (kwargs or {})
    return "dropout_p" in names and not given.get("dropout_p", 0.0)


def _draw_as_much(func: Any, args: Any, kwargs: Any) -> None:
    """Use up the random numbers of an operation on fakes: on the stage that has the values it is carried out."""
    if func.overloadpacket.__name__ in _DRAWN_UNTIL_IT_FITS:
        raise UnsupportedModelError(
            _refusal(func, args, kwargs, "decides how many random numbers are drawn ahead of the layers")
        )
    args, kwargs = pytree.tree_map_only(FakeTensor, _ones_like, (args, kwargs))
    with torch.no_grad():
        func(*args, **kwargs)


def _ones_like(fake: Tensor) -> Tensor:
    """Real ones; a probability, a weight and a deviation may be 1."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).fill_(1)


def _refusal(func: Any, args: Any, kwargs: Any, what: str) -> str:
    origins = sorted({origin_of(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if is_fake(leaf)})
    return (
        f"{', '.join(origins) or 'a tensor'} {what} (by {func}), but on this pipeline stage it does not exist: from "
        "stage to stage travel only the arguments of the layers. Pass what is needed through the layers, compute it "
        "from the batch, or give the module that holds it a place on every stage that uses it: "
        'PipelineParallelStrategy(place={"name": "every"})'
    )


class Filled(TorchFunctionMode):
    """Fakes that have got their values: user code holds the fake (`x` in ``x = x + block(x)``), here it counts as real.

    Inside a layer no such fake can be met, so that `paused` spares the layers the look.
    """

    def __init__(self) -> None:
        super().__init__()
        self.real: dict[int, Tensor] = {}
        self.paused = False
        self._kept: list[object] = []

    def fill(self, fake: object, tensor: Tensor) -> None:
        """Give a fake its values."""
        self._kept.append(fake)  # whose identity must not be given to another
        self.real[id(fake)] = tensor

    def of(self, value: Any) -> Any:
        """The values of a fake that has some; anything else as it is."""
        return self.real.get(id(value), value)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run with values where there are some."""
        if self.real and not self.paused:
            args, kwargs = pytree.tree_map_only(FakeTensor, self.of, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class FakeParameters(TorchFunctionMode):
    """Within this mode every parameter is fake, on every rank alike, whoever holds it."""

    def __init__(self, module: nn.Module, fakes: Fakes) -> None:
        super().__init__()
        self.fakes = fakes
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self._made: dict[nn.Parameter, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run with fakes for parameters."""
        args, kwargs = pytree.tree_map_only(nn.Parameter, self._fake, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _fake(self, parameter: nn.Parameter) -> Tensor:
        made = self._made.get(parameter)
        if made is None:
            origin = self.names.get(parameter, "a parameter")
            made = self._made[parameter] = self.fakes.like(parameter, origin, requires_grad=parameter.requires_grad)
        return made
