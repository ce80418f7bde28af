"""`CutParameter`: a parameter of which every rank of the axis holds a part, in a module that does not know it.

The module keeps its parameter objects, their names and, as far as it can see, their shapes. A cut parameter is a
`SplitTensor`: where it meets an operation with a rule (`F.linear`, `F.embedding`, an elementwise update) that is done
on the parts; a weight penalty over ``self.parameters()`` is right, because what has no rule sees the whole. The layers
of tensor parallelism (`layers`) are the rules of `F.linear`, `torch.addmm` and `F.embedding` for such weights.
"""

import torch
from torch import Tensor, nn

from lightning_dist.comm.mesh import Axis
from lightning_dist.comm.parts import part_of
from lightning_dist.core.shard import CUT, Cut, cut_of
from lightning_dist.core.split import Split
from lightning_dist.params.fragment import Fragment
from lightning_dist.params.questions import CLASS
from lightning_dist.tensor.split_tensor import WRITABLE, Lie, SplitTensor

LIE = "lie"
"""Attribute under which a `SplitTensor` says how its parts lie."""


class CutParameter(SplitTensor, nn.Parameter):
    """See the module docstring; made by `cut_in_place`."""

    __hash__ = nn.Parameter.__hash__

    def __eq__(self, other: object) -> bool | Tensor:  # type: ignore[override]
        """True for what an optimizer holds in its place, so that tables by parameter work; else elementwise."""
        return True if isinstance(other, Fragment) and other.whole is self else super().__eq__(other)

    def __deepcopy__(self, memo: object) -> "CutParameter":
        """A copy of this rank's part, cut alike."""
        with torch._C.DisableTorchFunctionSubclass():
            part = nn.Parameter(self.as_subclass(Tensor).detach().clone(), self.requires_grad)
        copy = _dress(part, self.lie, self.__dict__[CUT], self.__dict__[WRITABLE])
        if isinstance(memo, dict):
            memo[id(self)] = copy
        return copy


def cut_in_place(
    parameter: nn.Parameter, axis: Axis, dim: int, split: Split, *, name: str = "a parameter"
) -> CutParameter:
    """Keep this rank's part of a whole parameter, whose values are the same on all ranks of `axis`.

    Args:
        name: of the parameter in its module.
    """
    known = cut_of(parameter)
    assert known is None
    shape = tuple(parameter.shape)
    part = part_of(parameter.detach(), dim, split, axis.rank).clone()
    parameter.data = part
    return _dress(parameter, Lie(axis, dim, split), Cut(shape, dim, split, axis.rank), name)


def _dress(parameter: nn.Parameter, lie: Lie, cut: Cut, name: str) -> CutParameter:
    parameter.__dict__[LIE] = lie
    parameter.__dict__[CUT] = cut
    parameter.__dict__[WRITABLE] = name
    parameter.__dict__[CLASS] = CutParameter
    parameter.__class__ = CutParameter
    assert isinstance(parameter, CutParameter)
    return parameter
