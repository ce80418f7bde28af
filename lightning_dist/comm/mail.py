"""Mail: messages from one rank of an axis to another, for engines whose ranks do different things at a time.

To send never waits for the receiver, and to post a receive waits for nobody. Messages between two ranks match in order,
for each direction and channel on its own. A message is a list of tensors, which travels as one piece of memory
(`Packing`). How it travels is up to a carrier: shared memory (`shared_mail`), a backend of torch.distributed, or none
in a fake world.
"""

import itertools
import pickle
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.comm.arena import aligned
from lightning_dist.comm.collectives import Waitable, started
from lightning_dist.comm.ledger import Ledger
from lightning_dist.core.errors import ConfigurationError, PeerLostError, RankMismatchError

CHANNELS = ("forward", "backward")
OBJECTS = "objects"

Form = tuple[torch.dtype, torch.Size]
Open = Callable[[], list[Tensor]]


class Letter:
    """A receive that was posted."""

    def __init__(self, open_it: Open) -> None:
        self._open: Open | None = open_it

    def wait(self) -> list[Tensor]:
        """Block until the tensors are here (CUDA: order the current stream behind them). They belong to the caller.

        Raises:
            PeerLostError: the sender failed, died or did not come in time.
            RankMismatchError: other shapes or dtypes were sent than those waited for.
        """
        if self._open is None:
            raise RuntimeError("wait() was called twice on one letter: what it held belongs to the first caller")
        opened, self._open = self._open, None
        return opened()


class Carrier(Protocol):
    """How messages travel. A line is a channel or `OBJECTS`; peers are other ranks of the axis."""

    def send(self, tensors: Sequence[Tensor], peer: int, line: str) -> None:
        """Take the values of the tensors and return."""

    def post(self, packing: "Packing", peer: int, line: str) -> Open:
        """Expect the next message; the function waits for it."""

    def send_bytes(self, data: bytes, peer: int) -> None:
        """As `send`, on the line of objects."""

    def receive_bytes(self, peer: int) -> bytes:
        """Wait for the next message on the line of objects."""

    def flush(self) -> None:
        """Wait until what was sent needs no memory here any more."""


@dataclass(frozen=True)
class Mail:
    """Point-to-point messages along one axis of the mesh, booked in its ledger under "send"."""

    axis: str
    rank: int
    size: int
    carrier: Carrier
    ledger: Ledger

    def send(self, tensors: Sequence[Tensor], peer: int, *, channel: str, purpose: str) -> None:
        """Send tensors to a rank of the axis. Their values are taken before this returns; nobody is waited for.

        Args:
            channel: "forward" or "backward".

        Raises:
            ConfigurationError: no such channel, or no other rank of this number.
            PeerLostError: the receiver is gone (over a backend; shared memory is noticed by those that wait).
        """
        self._check(peer, channel)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.ledger.record(self.axis, "send", purpose, num_bytes)
        self.carrier.send([tensor.detach() for tensor in tensors], peer, channel)

    def post(self, like: Sequence[Tensor], peer: int, *, channel: str) -> Letter:
        """Expect the next message of a rank.

        Args:
            like: tensors, as on the meta device, that have the shapes and dtypes of those that will come.
        """
        self._check(peer, channel)
        return Letter(self.carrier.post(Packing.of(like), peer, channel))

    def send_object(self, obj: object, peer: int) -> None:
        """Send a small picklable object, by the CPU; the receiver is not waited for."""
        self._check(peer, OBJECTS)
        data = pickle.dumps(obj)
        self.ledger.record(self.axis, "send_object", "object", len(data))
        self.carrier.send_bytes(data, peer)

    def receive_object(self, peer: int) -> object:
        """Wait for the next object that a rank sends; None in a fake world."""
        self._check(peer, OBJECTS)
        data = self.carrier.receive_bytes(peer)
        return pickle.loads(data) if data else None

    def flush(self) -> None:
        """Complete what was sent: backends keep a copy of each message until then. Waits for the receivers there."""
        self.carrier.flush()

    def _check(self, peer: int, channel: str) -> None:
        if peer == self.rank:
            raise ConfigurationError(
                f"rank {peer} of axis {self.axis} would send a message to itself; hand the tensors over instead"
            )
        if not 0 <= peer < self.size:
            raise ConfigurationError(f"axis {self.axis} has ranks 0 to {self.size - 1}, none of number {peer}")
        if channel not in (*CHANNELS, OBJECTS):
            raise ConfigurationError(f'there is no channel "{channel}"; use one of {", ".join(CHANNELS)}')


@dataclass(frozen=True)
class Packing:
    """Where the tensors of a message lie in one piece of memory: one after the other, aligned.

    `digest` tells messages of different shapes or dtypes apart, `words` say it to a person.
    """

    forms: tuple[Form, ...]
    starts: tuple[int, ...]
    num_bytes: int
    digest: int
    words: str

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> "Packing":
        """For tensors like these."""
        return _packing(tuple((tensor.dtype, tensor.shape) for tensor in tensors))

    def pack(self, tensors: Sequence[Tensor], memory: Tensor) -> None:
        """Copy tensors of any strides into bytes."""
        for tensor, view in zip(tensors, self.views(memory), strict=True):
            view.copy_(tensor)

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors where they lie."""
        return [
            memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for (dtype, shape), start in zip(self.forms, self.starts, strict=True)
        ]

    def insist_on(self, digest: int, peer: int) -> None:
        """What came must be what is expected.

        Raises:
            RankMismatchError: it is not.
        """
        if digest != self.digest:
            raise RankMismatchError(
                f"rank {peer} of the axis sent other shapes or dtypes than those expected here: {self.words}. "
                "Both ends must send and post in the same order and agree on the shapes"
            )


@lru_cache(maxsize=4096)
def _packing(forms: tuple[Form, ...]) -> Packing:
    sizes = [aligned(shape.numel() * dtype.itemsize) for dtype, shape in forms]
    starts = [0, *itertools.accumulate(sizes)]
    words = ", ".join(f"{dtype} {tuple(shape)}" for dtype, shape in forms) or "no tensors"
    return Packing(forms, tuple(starts[:-1]), starts[-1], zlib.crc32(words.encode()), words)


@dataclass(eq=False)
class BackendCarrier:
    """Messages over torch.distributed: one isend per message of a packed copy, which is kept until it has gone.

    Over gloo, lines are told apart by tags, and a digest of shapes and dtypes follows the tensors. NCCL has no tags:
    each channel has a group for each direction, as a receive posted on a communicator holds up what comes after it.
    """

    rank: int
    gloo: dist.ProcessGroup
    device: torch.device
    native: dict[tuple[str, bool], dist.ProcessGroup] = field(default_factory=dict)
    under_way: dict[tuple[int, str], deque[tuple[Waitable, Tensor]]] = field(default_factory=lambda: defaultdict(deque))

    def send(self, tensors: Sequence[Tensor], peer: int, line: str) -> None:
        """See `Carrier`."""
        packing = Packing.of(tensors)
        memory = torch.empty(packing.num_bytes + self._tail, dtype=torch.uint8, device=self.device)
        packing.pack(tensors, memory)
        if self._tail:
            memory[packing.num_bytes :].view(torch.int64).fill_(packing.digest)
        if memory.numel():
            self._send(memory, peer, line)

    def post(self, packing: Packing, peer: int, line: str) -> Open:
        """See `Carrier`."""
        memory = torch.empty(packing.num_bytes + self._tail, dtype=torch.uint8, device=self.device)
        works = [self._receive(memory, peer, line)] if memory.numel() else []

        def open_it() -> list[Tensor]:
            _wait(works, peer)
            if self._tail:
                packing.insist_on(int(memory[packing.num_bytes :].view(torch.int64)), peer)
            views = packing.views(memory)
            return [view.clone() for view in views] if len(views) > 1 else views

        return open_it

    def send_bytes(self, data: bytes, peer: int) -> None:
        """See `Carrier`; the length goes ahead."""
        self._send(torch.tensor([len(data)]), peer, OBJECTS)
        self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8), peer, OBJECTS)

    def receive_bytes(self, peer: int) -> bytes:
        """See `Carrier`."""
        length = torch.zeros(1, dtype=torch.int64)
        _wait([self._receive(length, peer, OBJECTS)], peer)
        memory = torch.empty(int(length), dtype=torch.uint8)
        _wait([self._receive(memory, peer, OBJECTS)], peer)
        return memory.numpy().tobytes()

    def flush(self) -> None:
        """See `Carrier`."""
        for (peer, _), works in self.under_way.items():
            while works:
                _wait([works[0][0]], peer)
                works.popleft()

    @property
    def _tail(self) -> int:
        """Bytes of the digest; to look at it would make a CUDA device wait."""
        return 0 if self.native else 8

    def _group(self, peer: int, line: str, *, sending: bool) -> tuple[dist.ProcessGroup, int]:
        """The group and the tag."""
        if self.native and line != OBJECTS:
            return self.native[line, (self.rank < peer) == sending], 0
        return self.gloo, (*CHANNELS, OBJECTS).index(line)

    def _send(self, memory: Tensor, peer: int, line: str) -> None:
        works = self.under_way[peer, line]
        while works and works[0][0].is_completed():  # gloo does not say so before it is waited for: `flush`
            works.popleft()
        group, tag = self._group(peer, line, sending=True)
        try:
            works.append((started(dist.isend(memory, group=group, group_dst=peer, tag=tag)), memory))
        except RuntimeError as error:
            raise _lost(peer) from error

    def _receive(self, memory: Tensor, peer: int, line: str) -> Waitable:
        group, tag = self._group(peer, line, sending=False)
        try:
            return started(dist.irecv(memory, group=group, group_src=peer, tag=tag))
        except RuntimeError as error:
            raise _lost(peer) from error


def _wait(works: Sequence[Waitable], peer: int) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise _lost(peer) from error


def _lost(peer: int) -> PeerLostError:
    return PeerLostError(f"stops at a message: rank {peer} of its axis failed or died (see its own traceback)")


class FakeCarrier:
    """What is sent vanishes, what is received is zeros, at once."""

    def send(self, tensors: Sequence[Tensor], peer: int, line: str) -> None:
        """See `Carrier`."""

    def post(self, packing: Packing, peer: int, line: str) -> Open:
        """See `Carrier`."""
        return lambda: [torch.zeros(shape, dtype=dtype) for dtype, shape in packing.forms]

    def send_bytes(self, data: bytes, peer: int) -> None:
        """See `Carrier`."""

    def receive_bytes(self, peer: int) -> bytes:
        """See `Carrier`."""
        return b""

    def flush(self) -> None:
        """See `Carrier`."""
