"""The mesh: one `Axis` per dimension of the layout, each with its process groups and its lines in the ledger.

An axis keeps a process group per *channel*. Collectives match up by their order inside a group, so streams of
collectives whose order relative to each other may differ between ranks (gradients leave when they are ready,
parameters arrive when they are needed) must not share one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.comm import collectives
from lightning_dist.comm.alarm import Alarm
from lightning_dist.comm.backend_mail import BackendCarrier
from lightning_dist.comm.board import Terms
from lightning_dist.comm.collectives import Pending
from lightning_dist.comm.ledger import Ledger
from lightning_dist.comm.machine_memory import MachineMemory
from lightning_dist.comm.mail import Carrier, FakeCarrier, Mail
from lightning_dist.comm.parts import join, part_of
from lightning_dist.comm.rollcall import RollCall
from lightning_dist.comm.shared import SharedMemory
from lightning_dist.comm.shared_mail import SharedCarrier
from lightning_dist.comm.watch import Watch
from lightning_dist.core.errors import ConfigurationError, PeerLostError
from lightning_dist.core.layout import AXES, Layout
from lightning_dist.core.split import Split
from lightning_dist.core.stages import ring_bytes

CHANNELS = ("gather", "reduce")
WITH_MAIL = ("pp",)
"""Axes along which ranks send each other messages."""
WITH_ROLL_CALL = ("tp",)
"""Axes whose ranks alone announce to each other what other ranks of the world need not do."""


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this rank sees it; all its traffic is booked in the ledger under its name.

    `rollcall` announces reads that ranks of the axis might make alone; where it has none of its own, to the world.
    `shared` holds the channels that go through shared memory; the others use the backend. `mail` carries messages from
    rank to rank, on an axis that has them and is longer than 1.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    groups: dict[str, dist.ProcessGroup]
    backend: str
    ledger: Ledger
    rollcall: RollCall | None = None
    shared: dict[str, SharedMemory] = field(default_factory=dict)
    mail: Mail | None = None

    @property
    def p2p(self) -> bool:
        """Whether flat collectives go point to point (gloo)."""
        return self.backend == "gloo"

    @property
    def sums_in_output_dtype(self) -> bool:
        """Whether a reduce-scatter adds in the dtype of its output, whatever travels."""
        return self.p2p

    def all_gather(self, flat: Tensor, *, purpose: str) -> Pending:
        """Start to fill `flat` (size * S elements), of which this rank's chunk is in place. See `collectives`."""
        if self.size == 1:
            return Pending()
        self._book("all_gather", purpose, flat)
        if memory := self.shared.get("gather"):
            return memory.all_gather(flat)
        return collectives.all_gather(flat, group=self.groups["gather"], p2p=self.p2p)

    def reduce_scatter_mean(self, flat: Tensor, out: Tensor, *, purpose: str, add: bool = False) -> Pending:
        """Start ``out (+)= mean over ranks of this rank's chunk of flat``. See `collectives`."""
        if self.size == 1:
            return Pending((), lambda: _take(flat, out, add=add))
        return self._start_scatter(flat, out, purpose=purpose, scale=1.0 / self.size, add=add)

    def _start_scatter(self, flat: Tensor, out: Tensor, *, purpose: str, scale: float, add: bool) -> Pending:
        self._book("reduce_scatter", purpose, flat)
        if memory := self.shared.get("reduce"):
            return memory.reduce_scatter(flat, out, scale=scale, add=add)
        staging = flat.new_empty(flat.numel() - out.numel()) if self.p2p else None
        group = self.groups["reduce"]
        return collectives.reduce_scatter(flat, out, group=group, p2p=self.p2p, scale=scale, staging=staging, add=add)

    def all_reduce_mean(self, flat: Tensor, *, purpose: str) -> Pending:
        """Start ``flat = mean over ranks``, in place."""
        if self.size == 1:
            return Pending()
        return self._start_sum(flat, purpose=purpose, scale=1.0 / self.size)

    def _start_sum(self, flat: Tensor, *, purpose: str, scale: float) -> Pending:
        self._book("all_reduce", purpose, flat, times=2)
        if flat.is_contiguous() and (memory := self.shared.get("reduce")):
            return memory.all_reduce(flat.view(-1), scale=scale)
        return collectives.all_reduce(flat, group=self.groups["reduce"], scale=scale)

    def all_reduce(self, flat: Tensor, *, purpose: str, op: str = "sum") -> Tensor:
        """``flat = op over ranks`` ("sum", "max", "min"), in place and finished on return."""
        if self.size > 1 and op == "sum":
            self._start_sum(flat, purpose=purpose, scale=1.0).wait()
        elif self.size > 1:
            self._book("all_reduce", purpose, flat, times=2)
            if memory := self.shared.get("reduce"):
                everyone = flat.new_empty(self.size, flat.numel())
                memory.pieces(flat.reshape(-1), everyone.unbind()).wait()
                flat.copy_(_OPS[op].along(everyone, 0).view_as(flat))
            else:
                dist.all_reduce(flat, _OPS[op].of_backends, group=self.groups["reduce"])
        return flat

    def start_total_parts(self, whole: Tensor, dim: int, split: Split, *, purpose: str) -> tuple[Pending, Tensor]:
        """Start `total_parts`; its result is valid once waited for."""
        width = max(split.sizes) * _others(whole, dim)
        flat = whole.new_empty(self.size * width)
        for rank, chunk in enumerate(flat.chunk(self.size)):
            piece = part_of(whole, dim, split, rank)
            chunk[: piece.numel()].view(piece.shape).copy_(piece)
            chunk[piece.numel() :].zero_()
        out = flat.new_empty(width)
        pending = self._start_scatter(flat, out, purpose=purpose, scale=1.0, add=False)
        shape = (*whole.shape[:dim], split.sizes[self.rank], *whole.shape[dim + 1 :])
        return pending, out[: prod(shape)].view(shape)

    def start_all_reduce(self, flat: Tensor, *, purpose: str) -> Pending:
        """Start ``flat = sum over ranks``, in place."""
        if self.size == 1:
            return Pending()
        return self._start_sum(flat, purpose=purpose, scale=1.0)

    def gather_parts(self, part: Tensor, dim: int, split: Split, *, purpose: str) -> Tensor:
        """The whole tensor of which every rank holds its part along `dim`; finished on return."""
        if self.size == 1:
            return part
        width = max(split.sizes) * _others(part, dim)
        flat = part.new_empty(self.size * width)
        flat[self.rank * width :][: part.numel()].copy_(part.reshape(-1))
        self.all_gather(flat, purpose=purpose).wait()
        shapes = [(*part.shape[:dim], size, *part.shape[dim + 1 :]) for size in split.sizes]
        return join([f[: prod(s)].view(s) for f, s in zip(flat.chunk(self.size), shapes, strict=True)], dim, split)

    def total_parts(self, whole: Tensor, dim: int, split: Split, *, purpose: str) -> Tensor:
        """This rank's part along `dim` of the sum over the ranks of `whole`; finished on return."""
        if self.size == 1:
            return whole
        pending, out = self.start_total_parts(whole, dim, split, purpose=purpose)
        pending.wait()
        return out

    def broadcast(self, flat: Tensor, *, purpose: str, source: int = 0) -> Tensor:
        """``flat = flat of the axis rank source``, in place and finished on return."""
        if self.size > 1:
            self.ledger.record(self.name, "broadcast", purpose, flat.numel() * flat.element_size())
            if memory := self.shared.get("gather"):
                memory.broadcast(flat.view(-1), source).wait()
            else:
                dist.broadcast(flat, group=self.groups["gather"], group_src=source)
        return flat

    def collect(self, piece: Tensor, sizes: Sequence[int], *, purpose: str, out: Tensor | None) -> None:
        """Send every rank's `piece` to axis rank 0, which puts them one after the other into `out`.

        Args:
            piece: this rank's part, `sizes[rank]` elements.
            sizes: number of elements that each rank contributes (the same list on all ranks).
            out: on rank 0 a flat tensor of ``sum(sizes)`` elements, elsewhere None.
        """
        if self.size == 1:
            assert out is not None
            out.copy_(piece)
            return
        if self.rank and piece.numel():
            self.ledger.record(self.name, "collect", purpose, piece.numel() * piece.element_size())
        if memory := self.shared.get("gather"):
            parts = None if out is None else torch.split(out, list(sizes))
            memory.pieces(piece.reshape(-1), parts).wait()
            return
        group = self.groups["gather"]
        if self.rank:
            if piece.numel():
                dist.send(piece.contiguous(), group=group, group_dst=0)
            return
        assert out is not None
        for peer, part in enumerate(torch.split(out, list(sizes))):
            if peer == 0:
                part.copy_(piece)
            elif part.numel():
                dist.recv(part, group=group, group_src=peer)

    def _book(self, collective: str, purpose: str, flat: Tensor, *, times: int = 1) -> None:
        sent = times * ring_bytes(flat.numel(), flat.element_size(), self.size)
        self.ledger.record(self.name, collective, purpose, sent)


@dataclass(frozen=True)
class _Op:
    along: Callable[[Tensor, int], Tensor]
    of_backends: dist.ReduceOp.RedOpType


_OPS = {"max": _Op(torch.amax, dist.ReduceOp.MAX), "min": _Op(torch.amin, dist.ReduceOp.MIN)}


def _others(tensor: Tensor, dim: int) -> int:
    """Elements per index of `dim`."""
    return prod(tensor.shape[:dim]) * prod(tensor.shape[dim + 1 :])


def _take(flat: Tensor, out: Tensor, *, add: bool) -> None:
    if add:
        out.add_(flat)
    elif out.data_ptr() != flat.data_ptr():
        out.copy_(flat)


@dataclass(frozen=True)
class Mesh:
    """All axes of a layout, the ledger that they share, and the roll call of the whole world."""

    layout: Layout
    rank: int
    device: torch.device
    axes: dict[str, Axis]
    ledger: Ledger
    rollcall: RollCall
    alarm: Alarm | None = None

    @property
    def pp(self) -> Axis:
        """The pipeline axis, the one with `mail`."""
        return self.axes["pp"]

    @property
    def dp(self) -> Axis:
        """The data-parallel axis."""
        return self.axes["dp"]

    @property
    def tp(self) -> Axis:
        """The tensor-parallel axis."""
        return self.axes["tp"]

    @property
    def world(self) -> Axis:
        """All ranks in one line, for sums over the whole world."""
        return self.axes["world"]

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that this rank has filled, in all channels (see `arena`), boards apart.

        It stays for as long as the mesh, and no allocator of the process counts it.
        """
        arenas = [memory.arena for memory in self._channels]
        for carrier in self._carriers:
            arenas += carrier.arenas.values() if isinstance(carrier, SharedCarrier) else ()
        return sum(arena.written_bytes for arena in arenas)

    @property
    def _channels(self) -> list[SharedMemory]:
        """All that go through shared memory; an axis that spans the world is there under two names."""
        axes = {id(axis): axis for axis in self.axes.values()}.values()
        rollcalls = {id(call): call for call in (self.rollcall, *(axis.rollcall for axis in axes)) if call is not None}
        announcing = [call.shared for call in rollcalls.values() if call.shared is not None]
        return announcing + [memory for axis in axes for memory in axis.shared.values()]

    @property
    def _carriers(self) -> list[Carrier]:
        return [axis.mail.carrier for name, axis in self.axes.items() if axis.mail is not None and name in WITH_MAIL]

    def abort(self, reason: str) -> None:
        """This rank has failed: all that wait in shared memory, or begin to, raise PeerLostError with this reason.

        The mesh stays aborted, on all ranks, until they `recover`; only the first reason counts. Where there is no
        shared memory nothing happens: peers on backends hear of it when this process ends.
        """
        if self.alarm is not None:
            self.alarm.ring(reason)

    @property
    def aborted(self) -> bool:
        """Whether a rank has failed since the mesh was made or has recovered."""
        return self.alarm is not None and self.alarm.rings

    def recover(self) -> bool:
        """After a failure, once every rank has left what it was doing: go on as a new mesh would. Collective.

        Returns:
            Whether what was under way is forgotten. Backends cannot forget: over them, False.

        Raises:
            PeerLostError: a rank has died; or messages are under way on a backend.
        """
        forgotten = self.alarm is not None
        self.rollcall.meet()
        for memory in self._channels:
            memory.forget()
        clear = [carrier.forget() for carrier in self._carriers]
        if self.alarm is not None:
            self.alarm.silence()
        if not all(self.rollcall.meet(all(clear))):
            raise PeerLostError(
                "messages of a step that failed are still under way, and what travels over a backend cannot be called "
                "back: start all ranks again"
            )
        return forgotten

    @classmethod
    def from_world(
        cls, layout: Layout, device: torch.device | None = None, *, timeout: float = 1800.0, shared_memory: bool = True
    ) -> "Mesh":
        """Build the mesh on the default process group; collective, to be called on all ranks alike.

        Args:
            timeout: seconds that a rank waits for another in shared memory.
            shared_memory: let ranks that compute on the CPUs of one machine talk through its memory (see `shared`).

        Raises:
            ConfigurationError: no process group, or a layout that does not fill the world.
        """
        if not dist.is_initialized():
            raise ConfigurationError("no process group: call torch.distributed.init_process_group first")
        if layout.world_size != dist.get_world_size():
            raise ConfigurationError(
                f"{layout!r} needs {layout.world_size} ranks but the world has {dist.get_world_size()}"
            )
        rank = dist.get_rank()
        ledger = Ledger()
        backend = str(dist.get_backend())
        device = (
            device or torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        )
        talks = shared_memory and backend == "gloo" and layout.world_size > 1
        alarm, watch = _make_watch(layout) if talks else (None, None)
        terms = Terms(timeout, alarm, watch) if talks else None
        rollcall = RollCall.for_world(backend, ledger, terms)
        axes = {}
        for name in AXES:
            axes[name] = axis = _make_axis(name, layout, rank, backend, ledger, rollcall, terms)
            if name in WITH_ROLL_CALL and 1 < axis.size < layout.world_size and backend != "fake":
                axes[name] = replace(axis, rollcall=RollCall.over(_my_group(axis, layout, "gloo"), ledger, terms))
            if name in WITH_MAIL and axis.size > 1:
                axes[name] = replace(axis, mail=_make_mail(axis, layout, device, terms))
        axes["world"] = _make_world(axes, layout, rank, backend, ledger, terms)
        return cls(layout, rank, device, axes, ledger, rollcall, alarm)


def _make_watch(layout: Layout) -> tuple[Alarm | None, Watch | None]:
    """What ranks in shared memory hear from those that fail, and see of those that wait. Collective."""
    world = dist.group.WORLD
    assert world is not None
    alarm = Alarm.connect(world)
    memory = None if alarm is None else MachineMemory.connect(world, Watch.row_bytes(layout.world_size))
    return alarm, None if alarm is None or memory is None else Watch(world.rank(), memory, alarm)


def _make_axis(
    name: str, layout: Layout, rank: int, backend: str, ledger: Ledger, rollcall: RollCall, terms: Terms | None
) -> Axis:
    position = layout.coordinates(rank)[name]
    size = layout.size(name)
    groups: dict[str, dist.ProcessGroup] = {}
    mine: tuple[int, ...] = (rank,)
    for ranks in layout.groups(name) if size > 1 else ():
        for channel in CHANNELS:
            group = dist.new_group(ranks, backend=backend)
            if rank in ranks:
                groups[channel] = group
                mine = tuple(ranks)
    shared = _connect(groups, terms)
    return Axis(name, size, position, mine, groups, backend, ledger, rollcall, shared)


def _connect(groups: dict[str, dist.ProcessGroup], terms: Terms | None) -> dict[str, SharedMemory]:
    """The channels that can go through shared memory."""
    if terms is None:
        return {}
    joined = {channel: SharedMemory.connect(group, terms) for channel, group in groups.items()}
    return {channel: memory for channel, memory in joined.items() if memory is not None}


def _my_group(axis: Axis, layout: Layout, backend: str) -> dist.ProcessGroup:
    """A new group of the ranks of an axis. Collective over the world."""
    made: list[dist.ProcessGroup] = [dist.new_group(ranks, backend=backend) for ranks in layout.groups(axis.name)]
    return made[layout.groups(axis.name).index(list(axis.ranks))]


def _make_mail(axis: Axis, layout: Layout, device: torch.device, terms: Terms | None) -> Mail:
    """The mail of an axis of more than one rank. Collective over the world."""

    carrier: Carrier | None = None
    if axis.backend == "fake":
        carrier = FakeCarrier()
    else:
        gloo = _my_group(axis, layout, "gloo")
        carrier = None if terms is None else SharedCarrier.connect(gloo, terms)
        if carrier is None:
            new_group = None if axis.backend == "gloo" else lambda: _my_group(axis, layout, axis.backend)
            carrier = BackendCarrier.connect(gloo, device, new_group)
    return Mail(axis.name, axis.rank, axis.size, carrier, axis.ledger)


def _make_world(
    axes: dict[str, Axis], layout: Layout, rank: int, backend: str, ledger: Ledger, terms: Terms | None
) -> Axis:
    """The line of all ranks; an axis that spans the world already serves."""
    for axis in axes.values():
        if axis.size == layout.world_size:
            return axis
    everyone = tuple(range(layout.world_size))
    groups = {channel: dist.new_group(everyone, backend=backend) for channel in CHANNELS}
    shared = _connect(groups, terms)
    return Axis("world", layout.world_size, rank, everyone, groups, backend, ledger, shared=shared)
