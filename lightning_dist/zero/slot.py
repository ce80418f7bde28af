"""A parameter's place in its flat group: where it lies, what the optimizer holds of it, and how far its gradient is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_dist.comm.parts import part_of
from lightning_dist.core.errors import LightningDistError
from lightning_dist.core.shard import Cut, ShardSpec, cut_of
from lightning_dist.params.fragment import Fragment
from lightning_dist.params.questions import without_answers
from lightning_dist.zero import guard

if TYPE_CHECKING:
    from lightning_dist.zero.flat import FlatGroup


class Residency(Enum):
    """Where the values of a group's parameters are."""

    RELEASED = "released"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass(eq=False)
class Slot:
    """A parameter's place in its group: elements [start, stop) of the flat buffer."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    shape: torch.Size
    start: int
    stop: int
    group: "FlatGroup"
    fragment: nn.Parameter = field(init=False)  # what the optimizer updates: the owned part, flat
    stand_in: Tensor = field(init=False)
    master_version: int = 0  # of the fragment, when it last agreed with what is shown
    arrived: bool = False  # the group's local gradient holds a part of this parameter
    summed: bool = False  # the group's reduced gradient holds one, to which further micro-batches add
    held: bool = False  # a gradient was delivered, and not zeroed since as far as is known

    @property
    def name(self) -> str:
        """The parameter's own name."""
        return self.names[0]

    @property
    def gradient(self) -> Tensor | None:
        """The fragment's gradient as a plain tensor."""
        fragment = self.fragment
        return fragment.own_gradient if isinstance(fragment, Fragment) else fragment.grad

    @property
    def cut(self) -> Cut | None:
        """How tensor parallelism has cut the parameter before it came here."""
        return cut_of(self.parameter)

    def part_of(self, whole: Tensor) -> Tensor:
        """What this rank's tensor-parallel part is of a tensor that has the parameter's whole shape."""
        return whole if self.cut is None else part_of(whole, self.cut.dim, self.cut.split, self.cut.rank)

    def whole(self, part: Tensor, *, purpose: str) -> Tensor:
        """The whole from all tensor-parallel ranks' parts; collective where the parameter is cut."""
        if self.cut is None:
            return part
        return self.group.peers.gather_parts(part, self.cut.dim, self.cut.split, purpose=purpose)


@dataclass(frozen=True)
class Piece:
    """A parameter as this rank holds it: where it sits, its fragment, all of its names, and who holds the rest."""

    spec: ShardSpec
    slot: Slot

    @property
    def values(self) -> Tensor:
        """This rank's part in the master dtype, flat; a view."""
        return self.slot.group.piece(self.slot.group.owned, self.slot)


def take_over_assignment(slot: Slot, view: Tensor, dtypes: Sequence[torch.dtype], *, whole: bool = False) -> None:
    """Undo ``parameter.data = values``: put the values into `view`, the parameter's place, and show that again; local.

    Raises:
        LightningDistError: the new data has another shape, or a dtype that is none of `dtypes`; the place keeps its
            values.
    """
    parameter, shown = slot.parameter, without_answers(slot.parameter).detach()
    if (shown.data_ptr(), shown.shape, shown.stride(), shown.dtype) == (
        view.data_ptr(),
        view.shape,
        view.stride(),
        view.dtype,
    ):
        return
    new = shown.clone()  # it may share memory with its place (`p.data = p.data.t()`)
    guard.show(parameter, view, whole=whole)
    if new.shape != view.shape or new.dtype not in dtypes:
        raise LightningDistError(
            f"{slot.name}.data was set to a tensor of shape {tuple(new.shape)} and {new.dtype}, but the parameter was "
            f"sharded with shape {tuple(view.shape)} and {view.dtype}: shape and dtype are fixed from setup on. Change "
            "the module before trainer.fit (in __init__ or configure_model)"
        )
    with torch.no_grad():
        view.copy_(new)
