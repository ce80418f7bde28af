"""When units are gathered: on need, in an order that all ranks agree on, and a little ahead of need.

Ranks may run different layers (an expert without a token, a dropped layer), but an all-gather takes all of them. So
before each one the ranks say which unit they want; usually it is the same, else the union is gathered and everyone
drops what it did not ask for::

    rank 0 wants layer 3 \\                                      rank 0 keeps 3, drops 5
    rank 1 wants layer 5 /  ->  all gather 3, all gather 5  ->   rank 1 keeps 5, drops 3

Nothing can hang on a difference in control flow, and nothing has to be configured for it. The sequence of needs is
recorded; the next step prefetches by it, as far as `prefetch_bytes` allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_dist.comm.mesh import Mesh
from lightning_dist.comm.rollcall import Place, RollCall
from lightning_dist.core.shard import Home, home_of
from lightning_dist.core.stages import StageRow
from lightning_dist.zero.flat import FlatGroup
from lightning_dist.zero.pool import BufferPool
from lightning_dist.zero.slot import Residency
from lightning_dist.zero.units import NamedParameter, find_units


@dataclass(eq=False)
class Unit:
    """Flat groups that are gathered and released together."""

    index: int
    name: str
    groups: list[FlatGroup]
    callers: list[nn.Module] = field(default_factory=list)
    holds: int = 0  # while positive, the unit is not released
    shown: bool = False  # its masters are shown whole (`gathered`), so nothing is to be fetched
    calls: int = 0  # forward calls in this step
    open_calls: int = 0  # forward calls whose backward is not over

    @property
    def num_bytes(self) -> int:
        """Bytes of the unit's computing copy when it is gathered."""
        return sum(group.num_bytes for group in self.groups)

    @property
    def residency(self) -> Residency:
        """Residency of its groups, which is the same for all."""
        return self.groups[0].residency

    def start_gather(self) -> None:
        """Start the all-gathers of all groups; collective."""
        for group in self.groups:
            group.start_gather()

    def finish_gather(self) -> None:
        """Wait for them."""
        for group in self.groups:
            group.finish_gather()

    def release(self) -> None:
        """Free the computing copies, unless someone holds the unit."""
        if not self.holds and not self.shown:
            for group in self.groups:
                group.release()


def make_units(
    module: nn.Module, mesh: Mesh, row: StageRow, *, compute_dtype: torch.dtype | None, pool: BufferPool
) -> list[Unit]:
    """Take over all parameters of `module`, those of a unit that are alike in one flat group; see `units`."""
    units = []
    for index, plan in enumerate(find_units(module)):
        alike: dict[tuple[torch.dtype, bool, Home | None], list[NamedParameter]] = {}
        for item in plan.parameters:
            key = item.parameter.dtype, item.parameter.requires_grad, home_of(item.parameter)
            alike.setdefault(key, []).append(item)
        groups = [
            FlatGroup(
                items,
                row=row,
                axis=mesh.dp,
                peers=mesh.tp,
                stages=mesh.pp,
                home=home,
                compute_dtype=compute_dtype,
                device=mesh.device,
                pool=pool,
            )
            for (_, _, home), items in alike.items()
        ]
        units.append(Unit(index, plan.name, groups, plan.callers))
    return units


Need = tuple[int, bool]
"""A unit's index, and whether backward needed it."""


@dataclass
class Trace:
    """The order in which units were needed in the last step of a kind; predicts the present one."""

    expected: list[Need] = field(default_factory=list)
    seen: list[Need] = field(default_factory=list)
    position: int = 0

    def note(self, need: Need) -> None:
        """A unit is needed; move on to where the last step needed it."""
        self.seen.append(need)
        for place in range(self.position, len(self.expected)):
            if self.expected[place] == need:
                self.position = place + 1
                return

    @property
    def upcoming(self) -> list[Need]:
        """What is expected next."""
        return self.expected[self.position :]

    def restart(self) -> None:
        """A step is over: what was seen is what the next one expects."""
        if self.seen:
            self.expected, self.seen = self.seen, []
        self.position = 0


class Gatherer:
    """Keeps the units that are in use gathered, and few others."""

    def __init__(self, units: Sequence[Unit], rollcall: RollCall, *, prefetch_bytes: int) -> None:
        self.units, self.rollcall, self.prefetch_bytes = units, rollcall, prefetch_bytes
        self.traces: dict[str, Trace] = {}
        self.trace = Trace()
        self.in_backward = False
        rollcall.help_gather = self.help

    def begin(self, kind: str) -> None:
        """A step of this kind ("train", "eval") begins."""
        self.trace = self.traces.setdefault(kind, Trace())
        self.trace.restart()

    def need(self, unit: Unit) -> None:
        """Return when the unit's values are present; then start on what will be needed next."""
        if unit.shown:
            return
        self.trace.note((unit.index, self.in_backward))
        if unit.residency is Residency.RELEASED:
            self._gather_agreed(unit)
        unit.finish_gather()
        self._prefetch()

    def need_again(self, unit: Unit) -> None:
        """A saved tensor of the unit is read in backward. Usually it is present."""
        if unit.residency is not Residency.GATHERED and not unit.shown:
            self.need(unit)

    def needs_next(self, unit: Unit) -> bool:
        """Whether the last step used this very unit again at once, in the same pass (a layer that is used many times).

        The last layer's forward is followed by its own backward; it is released between them nevertheless, so that
        nothing is kept while the loss is computed, where activations peak.
        """
        return self.trace.upcoming[:1] == [(unit.index, self.in_backward)]

    def help(self, wanted: list[int]) -> None:
        """Take part in gathers that other ranks asked for."""
        self._gather_all(wanted, keep=None)

    def gather_anew(self, unit: Unit) -> None:
        """Bring a unit that stays gathered up to date with its masters."""
        self._gather_agreed(unit)
        unit.finish_gather()

    def _gather_agreed(self, unit: Unit) -> None:
        wanted = self.rollcall.ask(Place.GATHER, unit.index, what=f"of unit {unit.name}")
        self._gather_all(sorted(set(wanted)), keep=unit)

    def _gather_all(self, wanted: list[int], *, keep: Unit | None) -> None:
        for index in wanted:
            unit = self.units[index]
            guest = unit.residency is Residency.RELEASED and unit is not keep
            unit.start_gather()
            if unit is not keep:
                unit.finish_gather()
            if guest:
                unit.release()

    def _prefetch(self) -> None:
        ahead = 0
        for index, _ in self.trace.upcoming:
            unit = self.units[index]
            ahead += unit.num_bytes
            if ahead > self.prefetch_bytes:
                return
            if unit.residency is Residency.RELEASED:
                self._gather_agreed(unit)
