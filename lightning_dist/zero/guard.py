"""Parameters that are away, and gradients that exist only in shards: honest to look at, loud to touch.

While a unit is released, its parameters stay in the user's module with their identity, shape, dtype, name and
`requires_grad` true, because training scripts ask for them (`p.ndim >= 2` decides weight decay in half the world's
scripts). Only their values are gone. A released parameter therefore changes its *class* to `ReleasedParameter`,
which intercepts every torch call: questions about metadata are answered; anything that would read or write
values is handed to the owner of the parameter. The owner serves it by gathering where all ranks take part (inside
a training or validation step), and refuses it elsewhere, naming `gathered` as the remedy. A gathered parameter is an
ordinary `nn.Parameter` again and costs nothing.

Assigning ``__class__`` is how torch itself turns an uninitialized parameter into a real one.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dist.core.errors import ReleasedParameterError, ShardedGradientError
from lightning_dist.core.shard import CUT, cut_of
from lightning_dist.params.fragment import asked_for_identity
from lightning_dist.params.questions import QUESTIONS, SHAPE_QUESTIONS, own_class, seen_shape, shape_of_piece

_SLOT = "_lightning_dist_slot"


class Owner(Protocol):
    """Who is asked when the values of a released parameter are needed."""

    def touch(self, parameter: nn.Parameter) -> None:
        """Make the values present (the class is `nn.Parameter` again on return) or raise."""

    def load(self, parameter: nn.Parameter, values: Tensor) -> bool:
        """Take over whole new values; False when writing is not open at this moment."""


_METADATA: set[object] = (QUESTIONS - {torch.Tensor.untyped_storage}) | {
    getattr(torch.Tensor, "nbytes").__get__,  # noqa: B009 (a descriptor)
    torch.Tensor.register_hook,
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
}
"""What can be answered without values, apart from the shape."""


class ReleasedParameter(nn.Parameter):
    """A parameter whose values rest sharded on all ranks."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer questions about metadata; for anything else ask the owner for the values first."""
        kwargs = kwargs or {}
        parameter = args[0] if args else None
        if func in SHAPE_QUESTIONS and isinstance(parameter, Tensor):
            return SHAPE_QUESTIONS[func](seen_shape(parameter), *args[1:], **kwargs)
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.__repr__ and isinstance(parameter, nn.Parameter):
            with torch._C.DisableTorchFunctionSubclass():
                return (
                    f"Parameter(values sharded over all ranks, shape={tuple(parameter.shape)}, dtype={parameter.dtype})"
                )
        if func is torch.Tensor.is_contiguous:
            return True  # as it will be when it is gathered
        if func is torch.Tensor.copy_ and isinstance(parameter, ReleasedParameter):
            values = args[1] if len(args) > 1 else kwargs["src"]
            taken = owner_of(parameter).load(parameter, values)
            if taken:
                return parameter
        if (same := asked_for_identity(func, args)) is not None:
            return same
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, ReleasedParameter):
                owner_of(value).touch(value)
        return func(*args, **kwargs)


class ShardedGradient(Tensor):
    """What `p.grad` shows while the gradient exists only in shards (or only as this rank's unreduced part)."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer questions about metadata; refuse to show values that are not there."""
        if func in SHAPE_QUESTIONS:
            return SHAPE_QUESTIONS[func](seen_shape(args[0]), *args[1:], **(kwargs or {}))
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.__repr__:
            return "ShardedGradient()"
        raise ShardedGradientError(
            "this gradient exists only in shards: read it inside `with strategy.gathered(module, gradients=True):` on "
            "all ranks, take norms from `strategy.grad_norms()`, and clip by Trainer(gradient_clip_val=...) or "
            "self.clip_gradients(...)"
        )


def sharded_gradient(parameter: nn.Parameter) -> ShardedGradient:
    """A stand-in of the parameter's shape that holds one element."""
    with torch._C.DisableTorchFunctionSubclass():
        full = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        stand_in = full.as_subclass(ShardedGradient)
        stand_in.__dict__[CUT] = cut_of(parameter)
        return stand_in


def released_values(parameter: nn.Parameter) -> Tensor:
    """One NaN, expanded to the parameter's shape: true metadata, and loud should anything read past the guard."""
    shape = shape_of_piece(parameter)
    return torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device).expand(shape)


def hide(parameter: nn.Parameter, stand_in: Tensor) -> None:
    """Take the values away from a gathered parameter."""
    parameter.__class__ = nn.Parameter
    parameter.data = stand_in
    parameter.__class__ = ReleasedParameter


def show(parameter: nn.Parameter, values: Tensor, *, whole: bool = False) -> None:
    """Give a parameter its values (again): what this rank has of it, or with `whole` all of a cut one."""
    parameter.__class__ = nn.Parameter
    parameter.data = values
    parameter.__class__ = nn.Parameter if whole else own_class(parameter)


def own(parameter: nn.Parameter, owner: Owner) -> None:
    """Note who is to be asked about this parameter."""
    setattr(parameter, _SLOT, owner)


def disown(parameter: nn.Parameter) -> None:
    """Forget the owner."""
    parameter.__dict__.pop(_SLOT, None)


def is_owned(parameter: nn.Parameter) -> bool:
    """Whether an engine has taken this parameter over."""
    return _SLOT in parameter.__dict__


def owner_of(parameter: nn.Parameter) -> Owner:
    """Who is to be asked about this parameter."""
    owner: Owner | None = parameter.__dict__.get(_SLOT)
    if owner is None:
        raise ReleasedParameterError(
            "this is a copy of a parameter whose values rest sharded: copy the module inside "
            "`with strategy.gathered(module):`"
        )
    return owner
