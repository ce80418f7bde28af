"""Mail: messages from one rank of an axis to another, for engines whose ranks do different things at a time.

To send never waits for the receiver, and to post a receive waits for nobody. Messages between two ranks match in order,
for each direction and channel on its own. A message is a list of tensors, which travels as one piece of memory
(`Packing`). How it travels is up to a carrier: shared memory (`shared_mail`), a backend of torch.distributed
(`backend_mail`), or none in a fake world. Every letter is to be opened, in any order.
"""

import itertools
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from lightning_dist.comm.arena import aligned
from lightning_dist.comm.ledger import Ledger
from lightning_dist.core.errors import ConfigurationError, RankMismatchError

CHANNELS = ("forward", "backward")
OBJECTS = "objects"
LINES = (*CHANNELS, OBJECTS)

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

    def forget(self) -> bool:
        """Drop all messages under way. For all ranks between two barriers. Returns whether that can be done."""


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
        self._check(peer)
        data = pickle.dumps(obj)
        self.ledger.record(self.axis, "send_object", "object", len(data))
        self.carrier.send_bytes(data, peer)

    def receive_object(self, peer: int) -> object:
        """Wait for the next object that a rank sends; None in a fake world."""
        self._check(peer)
        data = self.carrier.receive_bytes(peer)
        return pickle.loads(data) if data else None

    def flush(self) -> None:
        """Complete what was sent: backends keep a copy of each message until then. Waits for the receivers there."""
        self.carrier.flush()

    def _check(self, peer: int, channel: str | None = None) -> None:
        if peer == self.rank:
            raise ConfigurationError(
                f"rank {peer} of axis {self.axis} would send a message to itself; hand the tensors over instead"
            )
        if not 0 <= peer < self.size:
            raise ConfigurationError(f"axis {self.axis} has ranks 0 to {self.size - 1}, none of number {peer}")
        if channel is not None and channel not in CHANNELS:
            raise ConfigurationError(f'there is no channel "{channel}"; use one of {", ".join(CHANNELS)}')


@dataclass(frozen=True)
class Packing:
    """Where the tensors of a message lie in one piece of memory: one after the other, aligned.

    `digest` tells messages of different shapes or dtypes apart, `words` say it to a person.
    """

    forms: tuple[Form, ...]
    places: tuple[tuple[torch.dtype, torch.Size, tuple[int, ...], int], ...]  # dtype, shape, strides, first element
    num_bytes: int
    digest: int
    words: str

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> "Packing":
        """For tensors like these."""
        return _packing(tuple((tensor.dtype, tensor.shape) for tensor in tensors))

    def pack(self, tensors: Sequence[Tensor], memory: Tensor, start: int = 0) -> None:
        """Copy tensors of any strides into memory, from a byte on."""
        for tensor, view in zip(tensors, self.views(memory, start), strict=True):
            view.copy_(tensor)

    def views(self, memory: Tensor, start: int = 0) -> list[Tensor]:
        """The tensors where they lie. `memory` is all of its storage; `start` is aligned."""
        return [
            memory.view(dtype).as_strided(shape, strides, first + start // dtype.itemsize)
            for dtype, shape, strides, first in self.places
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
    places = tuple(
        (dtype, shape, torch.empty(shape, device="meta").stride(), start // dtype.itemsize)
        for (dtype, shape), start in zip(forms, starts, strict=False)
    )
    words = ", ".join(f"{dtype} {tuple(shape)}" for dtype, shape in forms) or "no tensors"
    return Packing(forms, places, starts[-1], zlib.crc32(words.encode()), words)


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

    def forget(self) -> bool:
        """See `Carrier`."""
        return True
