"""`gathered`: full values of some units, to read and to write, whatever the stage.

Outside a step the values are the masters (float32 under bf16-mixed, not the rounded computing copies), in buffers that
exist only inside the block. Within a step they are the computing copies, held until backward is over.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_dist.comm.mesh import Axis
from lightning_dist.comm.rollcall import Place
from lightning_dist.core.errors import ConfigurationError, LightningDistError
from lightning_dist.core.stages import Placement
from lightning_dist.zero import guard
from lightning_dist.zero.flat import FlatGroup
from lightning_dist.zero.gather import Unit
from lightning_dist.zero.slot import Residency, Slot, take_over_assignment

if TYPE_CHECKING:
    from lightning_dist.zero.engine import ZeroEngine


@contextmanager
def gathered(
    engine: "ZeroEngine", what: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, gradients: bool
) -> Iterator[None]:
    """See `ZeroEngine.gathered`."""
    units = _units_of(engine, what)
    if engine.in_step is not None and not gradients:
        with _within_step(engine, units):
            yield
        return
    rollcall = engine.mesh.rollcall
    rollcall.call(Place.GATHERED, sum(31**i * (u.index + 1) for i, u in enumerate(units)) % 2**40)
    if engine.in_step is None and isinstance(what, nn.Module):
        engine.buffers.sync()
        engine.home_buffers.spread(what)
    with _outside_step(units, gradients=gradients, meet=lambda: rollcall.call(Place.GATHERED)):
        yield


def _units_of(engine: "ZeroEngine", what: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> list[Unit]:
    if isinstance(what, nn.Module):
        parameters = list(what.parameters())
    else:
        parameters = [what] if isinstance(what, nn.Parameter) else list(what)
    unknown = [p for p in parameters if p not in engine.slots]
    if unknown:
        raise ConfigurationError(
            f"gathered() got {len(unknown)} parameters that do not belong to the sharded module, "
            f"the first of shape {tuple(unknown[0].shape)}"
        )
    groups = {engine.slots[p].group for p in parameters}
    return [unit for unit in engine.units if not groups.isdisjoint(unit.groups)]


@contextmanager
def _within_step(engine: "ZeroEngine", units: Sequence[Unit]) -> Iterator[None]:
    """Hold the units; what is written is taken over for the elements that changed."""
    for unit in units:
        engine.hold(unit)
    yield
    for group in (group for unit in units for group in unit.groups):
        group.notice_writes()


@contextmanager
def _outside_step(units: Sequence[Unit], *, gradients: bool, meet: Callable[[], None]) -> Iterator[None]:
    """Show masters (and gradients) whole; take back what this rank owns, then let the ranks agree again."""
    units = [unit for unit in units if not unit.shown]  # the rest is shown by a block around this one
    groups = [group for unit in units for group in unit.groups]
    for group in groups:
        group.finish_gather()
        group.notice_writes()
    before = [group.residency for group in groups]
    shown = [_show_masters(group) for group in groups]
    shown_gradients = [_show_gradients(group) if gradients else None for group in groups]
    for unit in units:
        unit.shown = True
    refusal: LightningDistError | None = None
    try:
        yield
    finally:
        for unit in units:
            unit.shown = False
        for group, full, grads in zip(groups, shown, shown_gradients, strict=True):
            refusal = _take_over_assignments(group, full) or refusal
            if gradients:
                refusal = _take_back_gradients(group, grads) or refusal
        if any(group.row.parameter is not Placement.SHARD for group in groups):
            meet()
        for group, full in zip(groups, shown, strict=True):
            _take_back_masters(group, full)
        for group, residency in zip(groups, before, strict=True):
            _restore(group, residency)
    if refusal is not None:
        raise refusal


@dataclass(frozen=True)
class _Shown:
    """What a block sees of a group: its flat buffer in full, and each parameter's values, whole where it is cut."""

    full: Tensor
    values: list[Tensor]


def _in_full(group: FlatGroup, full: Tensor, purpose: str) -> _Shown:
    if group.here:
        parts = [full[slot.start : slot.stop].view(slot.shape) for slot in group.slots]
    else:
        parts = [full.new_empty(slot.shape) for slot in group.slots]
    if group.home is not None:
        for part in parts:
            group.stages.broadcast(part.view(-1), purpose=purpose, source=group.home.first)
    return _Shown(full, [s.whole(part, purpose=purpose) for s, part in zip(group.slots, parts, strict=True)])


def _write_back(slot: Slot, shown: _Shown, values: Tensor) -> None:
    """Put whole values into the flat buffer, where they are not views of it."""
    if slot.cut is not None and slot.group.here:
        shown.full[slot.start : slot.stop].view(slot.shape).copy_(slot.part_of(values))


def _show_masters(group: FlatGroup) -> _Shown:
    in_place = group.row.parameter is not Placement.SHARD and group.compute_dtype == group.master_dtype
    full = group.compute if in_place else _whole(group, group.owned, "parameters")
    shown = _in_full(group, full, "parameters")
    for slot, values in zip(group.slots, shown.values, strict=True):
        guard.show(slot.parameter, values, whole=True)
    return shown


def _take_over_assignments(group: FlatGroup, shown: _Shown) -> LightningDistError | None:
    """``parameter.data = values``. A refusal is for later: the ranks must first agree again."""
    refusal = None
    for slot, values in zip(group.slots, shown.values, strict=True):
        try:
            take_over_assignment(slot, values, (group.master_dtype, group.compute_dtype), whole=True)
        except LightningDistError as error:
            refusal = error
    return refusal


def _take_back_masters(group: FlatGroup, shown: _Shown) -> None:
    """Each rank keeps the range that it owns. Tensor-parallel peers take what the first of them has written."""
    for slot, values in zip(group.slots, shown.values, strict=True):
        for axis, source in _those_who_hold_the_same(group):
            first = values.detach().contiguous()
            values.detach().copy_(
                axis.broadcast(first.view(-1), purpose="parameters", source=source).view(values.shape)
            )
        _write_back(slot, shown, values)
    if shown.full.data_ptr() != group.compute.data_ptr() and group.here:
        group.owned.copy_(shown.full[group.low : group.high])
        group.stale = True


def _those_who_hold_the_same(group: FlatGroup) -> list[tuple[Axis, int]]:
    """The axes along which several ranks hold these parameters, and who speaks for them."""
    axes = [(group.peers, 0)] if group.peers.size > 1 else []
    if group.home is None and group.stages.size > 1:
        axes.append((group.stages, 0))
    elif group.home is not None and len(group.home.ranks) > 1:
        axes.append((group.stages, group.home.first))
    return axes


def _whole(group: FlatGroup, owned: Tensor, purpose: str) -> Tensor:
    full = torch.empty(group.padded, dtype=owned.dtype, device=owned.device)
    full[group.low : group.high].copy_(owned)
    if group.sharded_state:
        group.axis.all_gather(full, purpose=purpose).wait()
    return full


def _show_gradients(group: FlatGroup) -> _Shown | None:
    """Whole averaged gradients. Those of a micro-batch that is not reduced yet stay stand-ins (in stage 0: local)."""
    if group.reduced is None:
        return None
    full = group.reduced if not group.sharded_state else _whole(group, group.reduced, "gradients")
    shown = _in_full(group, full, "gradients")
    for slot, values in zip(group.slots, shown.values, strict=True):
        if slot.held and slot.fragment.grad is not None:
            slot.parameter.grad = values.to(slot.parameter.dtype)
    return shown


def _take_back_gradients(group: FlatGroup, shown: _Shown | None) -> LightningDistError | None:
    """What the block wrote into gradients counts, and a gradient that it set to None is gone."""
    refusal, given = None, []
    for index, slot in enumerate(group.slots):
        gradient = slot.parameter.grad
        if gradient is None or isinstance(gradient, guard.ShardedGradient):
            if gradient is None and slot.held:
                group.drop(slot)
        elif shown is not None:
            place = shown.values[index]
            if place.data_ptr() != gradient.data_ptr():
                place.copy_(gradient.detach())
            _write_back(slot, shown, place)
            given.append(slot)
        elif slot.fragment is not slot.parameter:
            slot.parameter.grad = None
            refusal = LightningDistError(
                f"{slot.name}.grad was set where no averaged gradient is: set gradients after the backward that "
                "completes an optimizer step, in on_before_optimizer_step for instance"
            )
    if shown is not None and group.reduced is not None:
        if shown.full is not group.reduced:
            group.reduced.copy_(shown.full[group.low : group.high])
        for slot in given:
            if slot.cut is not None:
                slot.parameter.grad = None  # of the whole shape, which the part that is shown next has not
            group.deliver(slot, reduced=True)
    return refusal


def _restore(group: FlatGroup, residency: Residency) -> None:
    if not group.here:
        for slot in group.slots:
            guard.show(slot.parameter, slot.stand_in)
        group.release()
    elif group.row.parameter is Placement.SHARD:
        for slot in group.slots:
            guard.hide(slot.parameter, slot.stand_in)
        if residency is not Residency.RELEASED:  # what was gathered before the block may be out of date now
            group.drop_computing_copy()
    else:
        if not group.sharded_state:
            group.axis.broadcast(group.owned, purpose="parameters")
        group.start_refresh().wait()
        for slot, view in zip(group.slots, group.views, strict=True):
            guard.show(slot.parameter, view)
    for slot in group.slots:
        if slot.held and slot.parameter.grad is None and slot.fragment is not slot.parameter:
            slot.parameter.grad = guard.sharded_gradient(slot.parameter)
