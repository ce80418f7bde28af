"""Mail over a backend of torch.distributed: one isend per message, of a packed copy that is kept until it has gone.

**Gloo** has one group, on which lines are told apart by tags. A digest of shapes and dtypes follows the tensors, so
that what is not expected is noticed (where more comes than is expected, gloo itself ends the process). Whether a send
is done gloo only says to those who wait, so copies are kept until `flush`.

**NCCL** has no tags, and two things to avoid. What is queued on a communicator runs in order, so a receive that is
posted early would hold up a later send: a rank sends and receives on different communicators as far as its neighbours
go (see `stream_of`). And the first use of a communicator, or of a connection on it, holds up the host until the other
end comes: all are used once when the mesh is built. Objects travel on the CPU, by gloo.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.comm.arena import ALIGNMENT
from lightning_dist.comm.collectives import Waitable, started
from lightning_dist.comm.mail import CHANNELS, LINES, OBJECTS, Open, Packing
from lightning_dist.core.errors import PeerLostError

Stream = tuple[str, bool, int]


def stream_of(channel: str, sender: int, receiver: int) -> Stream:
    """Which communicator a message travels on: one for each channel, direction and parity of the sender.

    So what a rank sends to a neighbour and what it receives from one never queue behind each other.
    """
    return channel, sender < receiver, sender % 2


@dataclass(eq=False)
class BackendCarrier:
    """See `mail.Carrier`. Over gloo there are no `streams`."""

    rank: int
    gloo: dist.ProcessGroup
    device: torch.device
    streams: dict[Stream, dist.ProcessGroup] = field(default_factory=dict)
    under_way: dict[tuple[int, str], deque[tuple[Waitable, Tensor]]] = field(default_factory=lambda: defaultdict(deque))
    expected: int = 0  # messages whose receive was started and not waited for

    @classmethod
    def connect(
        cls, gloo: dist.ProcessGroup, device: torch.device, new_group: Callable[[], dist.ProcessGroup] | None
    ) -> "BackendCarrier":
        """Join the ranks of a gloo group, where `new_group` is given by groups of another backend. Collective."""
        rank, size = gloo.rank(), gloo.size()
        if new_group is None:
            return cls(rank, gloo, device)
        pairs = [(c, a, b) for c in CHANNELS for a, b in itertools.permutations(range(size), 2)]
        streams = {stream: new_group() for stream in sorted({stream_of(*pair) for pair in pairs})}
        carrier = cls(rank, gloo, device, streams)
        for stream, group in streams.items():
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            peers = {other for pair in pairs if stream_of(*pair) == stream and rank in pair for other in pair[1:]}
            greetings = [
                dist.P2POp(op, torch.zeros(1, device=device), group=group, group_peer=peer)
                for peer in sorted(peers - {rank})
                for op, ends in ((dist.isend, (rank, peer)), (dist.irecv, (peer, rank)))
                if stream_of(stream[0], *ends) == stream
            ]
            for work in dist.batch_isend_irecv(greetings) if greetings else ():
                work.wait()
        return carrier

    def send(self, tensors: Sequence[Tensor], peer: int, line: str) -> None:
        """See `Carrier`."""
        packing = Packing.of(tensors)
        memory = self._memory(packing)
        packing.pack(tensors, memory)
        if self._tail:
            memory.numpy().view(np.int64)[packing.num_bytes // 8] = packing.digest
        if memory.numel():
            self._send(memory, peer, line)

    def post(self, packing: Packing, peer: int, line: str) -> Open:
        """See `Carrier`."""
        memory = self._memory(packing)
        if self._tail:
            memory.numpy().view(np.int64)[packing.num_bytes // 8] = 0  # a shorter message leaves it so
        works = [self._receive(memory, peer, line)] if memory.numel() else []
        self.expected += len(works)

        def open_it() -> list[Tensor]:
            for work in works:
                _wait(work, peer)
                self.expected -= 1
            if self._tail:
                packing.insist_on(int(memory.numpy().view(np.int64)[packing.num_bytes // 8]), peer)
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
        _wait(self._receive(length, peer, OBJECTS), peer)
        memory = torch.empty(int(length), dtype=torch.uint8)
        _wait(self._receive(memory, peer, OBJECTS), peer)
        return memory.numpy().tobytes()

    def flush(self) -> None:
        """See `Carrier`."""
        for (peer, _), works in self.under_way.items():
            while works:
                _wait(works[0][0], peer)
                works.popleft()

    def forget(self) -> bool:
        """See `Carrier`; a backend's receives that were started wait for good."""
        return not self.expected and not any(self.under_way.values())

    @property
    def _tail(self) -> int:
        """Bytes for the digest; to look at it would make a CUDA device wait."""
        return 0 if self.streams else ALIGNMENT

    def _memory(self, packing: Packing) -> Tensor:
        return torch.empty(packing.num_bytes + self._tail, dtype=torch.uint8, device=self.device)

    def _send(self, memory: Tensor, peer: int, line: str) -> None:
        works = self.under_way[peer, line]
        while works and works[0][0].is_completed():
            works.popleft()
        works.append((self._start(dist.isend, memory, peer, line), memory))

    def _receive(self, memory: Tensor, peer: int, line: str) -> Waitable:
        return self._start(dist.irecv, memory, peer, line)

    def _start(self, op: Callable[..., object], memory: Tensor, peer: int, line: str) -> Waitable:
        sending = op is dist.isend
        try:
            if self.streams and line != OBJECTS:
                ends = (self.rank, peer) if sending else (peer, self.rank)
                group = self.streams[stream_of(line, *ends)]
                # In a batch, even of one, NCCL takes the group's communicator in place of one more for the pair.
                return started(dist.batch_isend_irecv([dist.P2POp(op, memory, group=group, group_peer=peer)])[0])
            end = {"group_dst" if sending else "group_src": peer}
            return started(op(memory, group=self.gloo, tag=LINES.index(line), **end))
        except RuntimeError as error:
            raise _lost(peer) from error


def _wait(work: Waitable, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _lost(peer) from error


def _lost(peer: int) -> PeerLostError:
    return PeerLostError(f"stops at a message: rank {peer} of its axis failed or died (see its own traceback)")
