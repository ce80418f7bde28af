"""Parameters that live on other stages: their names, shapes and identity stay, their memory goes.

`configure_optimizers`, a weight-decay rule or a count of parameters sees the whole module on every rank. A forward may
touch an absent parameter only ahead of the stage's own layers, where nothing is computed: there it stands for a fake
tensor, and what follows from it is fake too (`rehearsal`). Any other read is an error that names the remedy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dist.core.errors import ReleasedParameterError
from lightning_dist.core.shard import home_of
from lightning_dist.params.fragment import asked_for_identity
from lightning_dist.params.questions import CLASS, QUESTIONS, SHAPE_QUESTIONS, seen_shape
from lightning_dist.pipeline.fakes import Fakes
from lightning_dist.pipeline.homes import is_here

_STANDS_FOR = "_lightning_dist_absent"


@dataclass(eq=False)
class _Absence:
    name: str
    fakes: Fakes


class AbsentParameter(nn.Parameter):
    """A parameter of another stage."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer questions; within a stage's run be a fake; elsewhere refuse."""
        kwargs = kwargs or {}
        if func in SHAPE_QUESTIONS and isinstance(args[0], AbsentParameter):
            return SHAPE_QUESTIONS[func](seen_shape(args[0]), *args[1:], **kwargs)
        if func in QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.__repr__:
            return f"Parameter(on another pipeline stage, shape={seen_shape(args[0])}, dtype={args[0].dtype})"
        if (same := asked_for_identity(func, args)) is not None:
            return same
        args, kwargs = pytree.tree_map_only(AbsentParameter, _stand_in, (args, kwargs))
        return func(*args, **kwargs)


def _stand_in(parameter: AbsentParameter) -> Tensor:
    absence: _Absence | None = vars(parameter).get(_STANDS_FOR)
    if absence is None or not absence.fakes.active:
        name = "a parameter" if absence is None else absence.name
        home = home_of(parameter)
        where = "another rank" if home is None else f"pipeline rank {', '.join(map(str, home.ranks))}"
        raise ReleasedParameterError(
            f"{name} was read or written here, but it lives on {where}. Wrap the code in `with "
            "trainer.strategy.gathered(module):`, called on all ranks; for checkpoints call trainer.save_checkpoint, "
            "for whole weights strategy.full_state_dict()"
        )
    return absence.fakes.of(parameter, absence.name)


def let_go(module: nn.Module, fakes: Fakes) -> int:
    """Free the values of all parameters that live elsewhere; the number of elements freed."""
    freed = 0
    names = {parameter: name for name, parameter in module.named_parameters()}
    for parameter, name in names.items():
        if is_here(parameter) or isinstance(parameter, AbsentParameter):
            continue
        parameter.__class__ = nn.Parameter  # where it is cut, too: what is let go is this rank's part
        freed += parameter.numel()
        if parameter.is_meta:
            _leave_meta(parameter)
        vars(parameter)[_STANDS_FOR] = _Absence(name, fakes)
        vars(parameter)[CLASS] = AbsentParameter
        parameter.data = stand_in_values(parameter)
        parameter.__class__ = AbsentParameter
    return freed


def _leave_meta(parameter: nn.Parameter) -> None:
    """Become a parameter of the device on which those that are held will be; the object stays the same."""
    notes = dict(vars(parameter))
    there = nn.Parameter(stand_in_values(parameter), parameter.requires_grad)
    torch.utils.swap_tensors(parameter, there)  # type: ignore[no-untyped-call]
    vars(parameter).update(notes)


def stand_in_values(parameter: nn.Parameter) -> Tensor:
    """One NaN, expanded to the parameter's shape."""
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    return torch.full((), float("nan"), dtype=parameter.dtype, device=device).expand(parameter.shape)


def take_back(module: nn.Module) -> None:
    """Undo `let_go` for parameters whose values were put back."""
    for parameter in module.parameters():
        if vars(parameter).pop(_STANDS_FOR, None) is not None:
            vars(parameter).pop(CLASS, None)
            parameter.__class__ = nn.Parameter
