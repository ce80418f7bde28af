"""`gathered`: full values of some units, to read and to write, whatever the stage.

Outside a step the values are the masters (float32 under bf16-mixed, not the rounded computing copies), in buffers that
exist only inside the block. Within a step they are the computing copies, held until backward is over.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dist.core.stages import Placement
from lightning_dist.zero import guard
from lightning_dist.zero.flat import FlatGroup, Residency
from lightning_dist.zero.gather import Unit

if TYPE_CHECKING:
    from lightning_dist.zero.engine import ZeroEngine


@contextmanager
def gathered_within_step(engine: "ZeroEngine", units: Sequence[Unit]) -> Iterator[None]:
    """Hold the units; what is written is taken over for the elements that changed."""
    for unit in units:
        engine.hold(unit)
    yield
    for group in (group for unit in units for group in unit.groups):
        if group.residency is Residency.GATHERED:
            group.take_over_changes()


@contextmanager
def gathered_outside_step(units: Sequence[Unit], *, gradients: bool, meet: Callable[[], None]) -> Iterator[None]:
    """Show masters (and gradients) whole; take back what this rank owns, then let the ranks agree again."""
    units = [unit for unit in units if not unit.shown]  # the rest is shown by a block around this one
    groups = [group for unit in units for group in unit.groups]
    before = [group.residency for group in groups]
    shown = [_show_masters(group) for group in groups]
    grads = [_show_gradients(group) if gradients else None for group in groups]
    for unit in units:
        unit.shown = True
    try:
        yield
    finally:
        for unit in units:
            unit.shown = False
        for group, full, grad in zip(groups, shown, grads, strict=True):
            if grad is not None:
                _take_back_gradients(group, grad)
            if full.data_ptr() != group.compute.data_ptr():
                group.owned.copy_(full[group.low : group.high])
        if any(group.row.parameter is not Placement.SHARD for group in groups):
            meet()
        for group, residency in zip(groups, before, strict=True):
            _restore(group, residency)


def _show_masters(group: FlatGroup) -> Tensor:
    in_place = group.row.parameter is not Placement.SHARD and group.compute_dtype == group.master_dtype
    full = group.compute if in_place else _whole(group, group.owned, "parameters")
    for slot in group.slots:
        guard.show(slot.parameter, full[slot.start : slot.stop].view(slot.shape))
    return full


def _whole(group: FlatGroup, owned: Tensor, purpose: str) -> Tensor:
    full = torch.empty(group.padded, dtype=owned.dtype, device=owned.device)
    full[group.low : group.high].copy_(owned)
    if group.sharded_state:
        group.axis.all_gather(full, purpose=purpose).wait()
    return full


def _show_gradients(group: FlatGroup) -> Tensor | None:
    if group.reduced is None:
        return None
    full = _whole(group, group.reduced, "gradients")
    for slot in group.slots:
        if slot.held and slot.fragment.grad is not None:
            slot.parameter.grad = full[slot.start : slot.stop].view(slot.shape).to(slot.parameter.dtype)
    return full


def _take_back_gradients(group: FlatGroup, full: Tensor) -> None:
    assert group.reduced is not None
    for slot in group.slots:
        if slot.held and slot.parameter.grad is not None:
            full[slot.start : slot.stop].copy_(slot.parameter.grad.detach().reshape(-1))
            if slot.fragment is not slot.parameter:
                slot.parameter.grad = None  # of the masters' dtype perhaps; the stand-in follows below
    group.reduced.copy_(full[group.low : group.high])


def _restore(group: FlatGroup, residency: Residency) -> None:
    if residency is Residency.RELEASED:
        for slot in group.slots:
            guard.hide(slot.parameter, slot.stand_in)
    else:
        if group.row.parameter is not Placement.SHARD:
            if not group.sharded_state:
                group.axis.broadcast(group.owned, purpose="parameters")
            group.start_refresh().wait()
        for slot, view in zip(group.slots, group.views, strict=True):
            guard.show(slot.parameter, view)
            slot.version = slot.parameter._version
    for slot in group.slots:
        if slot.held and slot.parameter.grad is None and slot.fragment is not slot.parameter:
            slot.parameter.grad = guard.sharded_gradient(slot.parameter)
