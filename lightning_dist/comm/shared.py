"""Collectives over shared memory, for ranks that compute on the CPUs of one machine.

Over gloo, bytes between two processes of one machine go through the loopback network and its threads. Here every rank
has an *arena* (`arena`) that all ranks may map: to send is to copy into one's own arena and to say so; to receive is to
read the peers' arenas. What is said goes through a small *board* that all ranks map::

    board     started[r]    operations that rank r has put into its arena
              finished[r]   operations whose peers' parts rank r has read
              reduced[r]    operations of which rank r has published its reduced chunk
              place[r][i]   where operation i of rank r lies: number of the segment, first byte

    all-gather       copy own chunk in | wait started   | copy the peers' chunks out          | finished
    reduce-scatter   copy chunks in    | wait started   | add up own chunk from all arenas    | finished
    all-reduce       copy all in       | wait started   | as reduce-scatter, chunk back in, wait reduced, copy out

To start an operation never waits: an arena that is full grows, and the peers map the new segment when they come to read
it. So operations may be started in the middle of anything. Sums are made in rank order, so all ranks get the same bits.
Waiting is polling with short sleeps: a rank that waits has nothing else to do. A peer that has died is noticed by its
process id.

Memory order rests on x86, whose stores become visible in program order; elsewhere, and between machines, gloo is used:
all ranks agree on that.
"""

import contextlib
import itertools
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.comm.arena import Arena, mapped, new_handle
from lightning_dist.comm.collectives import Pending
from lightning_dist.comm.neighbours import Neighbours
from lightning_dist.core.errors import PeerLostError

COUNTERS, SLOTS, WORDS = 3, 4096, 2
"""Rows of counters, operations that may be open at once, and numbers that say where one of them lies."""
STARTED, FINISHED, REDUCED = range(COUNTERS)
SPINS, NAP, LOOK_FOR_THE_DEAD = 200, 20e-6, 0.2

Board = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@dataclass(eq=False)
class SharedMemory:
    """One channel of collectives between the ranks of a group; operations match by their order."""

    neighbours: Neighbours
    pids: list[int]
    board: Board
    timeout: float
    arena: Arena
    mapped: dict[int, list[Tensor]] = field(default_factory=dict)  # the peers' segments
    done: set[int] = field(default_factory=set)  # finished here, after one that is not
    count: int = 0

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.neighbours.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.pids)

    @classmethod
    def connect(cls, group: dist.ProcessGroup, *, timeout: float) -> "SharedMemory | None":
        """Join the ranks of a gloo group over shared memory; None, on all of them, where that cannot be. Collective.

        Args:
            timeout: seconds that a rank waits for another before it is an error.
        """
        rank, size = group.rank(), group.size()

        def exchange(mine: object) -> list[object]:
            said: list[object] = [None] * size
            dist.all_gather_object(said, mine, group=group)
            return said

        machine = _machine()
        machines, pids = exchange(machine), [int(str(pid)) for pid in exchange(os.getpid())]
        if machine is None or len(set(machines)) > 1:
            return None
        neighbours: Neighbours | None = None
        with contextlib.suppress(OSError):
            neighbours = Neighbours.meet(rank, size, exchange)
        if not all(exchange(neighbours is not None)) or neighbours is None:
            return None
        handle = new_handle(8 * (COUNTERS + SLOTS * WORDS) * size) if rank == 0 else neighbours.receive_handle(0)
        if rank == 0:
            neighbours.send_handle(handle)
        board = mapped(handle).view(torch.int64).numpy().reshape(-1, size)
        return cls(neighbours, pids, board, timeout, Arena(neighbours.send_handle))

    # Collectives ----------------------------------------------------------------------------------------------

    def all_gather(self, flat: Tensor) -> Pending:
        """See `collectives.all_gather`."""
        chunks = flat.chunk(self.size)
        sent = self._publish([chunks[self.rank]])

        def finish() -> None:
            self._wait(STARTED, sent)
            for peer, chunk in enumerate(chunks):
                if peer != self.rank:
                    chunk.copy_(self._read(sent, peer, 0, chunk))
            self._finished(sent)

        return Pending((), finish)

    def reduce_scatter(self, flat: Tensor, out: Tensor, *, scale: float, add: bool) -> Pending:
        """See `collectives.reduce_scatter`."""
        chunks = flat.chunk(self.size)
        own = chunks[self.rank]
        sent = self._publish([chunk for rank, chunk in enumerate(chunks) if rank != self.rank])

        def finish() -> None:
            self._wait(STARTED, sent)
            for peer in range(self.size):
                place = self.rank - (self.rank > peer)  # a rank's own chunk is not in its arena
                part = own if peer == self.rank else self._read(sent, peer, place * own.numel(), own)
                if peer == 0 and not add:
                    torch.mul(part, scale, out=out) if out.dtype == part.dtype else out.copy_(part).mul_(scale)
                else:
                    out.add_(part, alpha=scale)
            self._finished(sent)

        return Pending((), finish)

    def all_reduce(self, flat: Tensor, *, scale: float) -> Pending:
        """See `collectives.all_reduce`; in place."""
        sent = self._publish([flat])
        add_up = self._add_pair if self.size == 2 else self._add_chunks

        def finish() -> None:
            self._wait(STARTED, sent)
            add_up(flat, sent)
            if scale != 1.0:
                flat.mul_(scale)
            self._finished(sent)

        return Pending((), finish)

    def _add_pair(self, flat: Tensor, sent: "int") -> None:
        """Two ranks: what is here and what is there; addition does not see which is first."""
        flat.add_(self._read(sent, 1 - self.rank, 0, flat))

    def _add_chunks(self, flat: Tensor, sent: "int") -> None:
        """Each rank adds up one chunk and puts it back into its arena, from where the others read it."""
        bounds = [flat.numel() * rank // self.size for rank in range(self.size + 1)]
        chunks = [flat[start:stop] for start, stop in itertools.pairwise(bounds)]
        own, start = chunks[self.rank], bounds[self.rank]
        parts = [own if peer == self.rank else self._read(sent, peer, start, own) for peer in range(self.size)]
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        self._read(sent, self.rank, start, own).copy_(total)
        self.board[REDUCED, self.rank] = sent
        own.copy_(total)
        self._wait(REDUCED, sent)
        for peer, chunk in enumerate(chunks):
            if peer != self.rank:
                chunk.copy_(self._read(sent, peer, bounds[peer], chunk))

    # Sending and reading --------------------------------------------------------------------------------------

    def _publish(self, pieces: Sequence[Tensor]) -> int:
        """Put tensors of one dtype into the own arena, one after the other; the number of the operation."""
        like = pieces[0]
        through = int(self.board[FINISHED].min())
        self.arena.take_back(through)
        if self.count + 1 - through >= SLOTS:
            raise RuntimeError(f"{SLOTS} collectives were started and none of them was waited for")
        self.count += 1
        place, memory = self.arena.lend(self.count, sum(piece.numel() for piece in pieces) * like.element_size())
        target = memory.view(like.dtype)
        torch.cat(list(pieces), out=target) if len(pieces) > 1 else target.copy_(like)
        self.board[self._slot(self.count), self.rank] = place.segment, place.start
        self.board[STARTED, self.rank] = self.count
        return self.count

    def _slot(self, number: int) -> slice:
        first = COUNTERS + number % SLOTS * WORDS
        return slice(first, first + WORDS)

    def _read(self, number: int, peer: int, element: int, like: Tensor) -> Tensor:
        """What a peer has published in an operation, from an element on, as a tensor like `like`."""
        segment, start = map(int, self.board[self._slot(number), peer])
        memory = self._segment(peer, segment)
        size = like.element_size()
        start += element * size
        return memory[start : start + like.numel() * size].view(like.dtype)

    def _segment(self, peer: int, number: int) -> Tensor:
        if peer == self.rank:
            return self.arena.segments[number]
        known = self.mapped.setdefault(peer, [])
        while len(known) <= number:
            try:
                known.append(mapped(self.neighbours.receive_handle(peer)))
            except OSError as error:
                raise self._lost(peer) from error
        return known[number]

    def _finished(self, number: int) -> None:
        """The peers' parts were read. Operations may finish in any order; peers hear of those with none open before."""
        self.done.add(number)
        through = int(self.board[FINISHED, self.rank])
        while through + 1 in self.done:
            through += 1
            self.done.remove(through)
        self.board[FINISHED, self.rank] = through

    # Waiting --------------------------------------------------------------------------------------------------

    def _wait(self, row: int, operation: int) -> None:
        """Until every rank's counter has come this far.

        Raises:
            PeerLostError: a rank has died, or nothing has happened for the whole time limit.
        """
        counters = self.board[row]
        for _ in range(SPINS if self.size <= (os.cpu_count() or 1) else 5):  # where ranks share cores, nap at once
            if counters.min() >= operation:
                return
        begun = looked = time.monotonic()
        while counters.min() < operation:
            time.sleep(NAP)
            now = time.monotonic()
            if now - looked > LOOK_FOR_THE_DEAD:
                looked = now
                late = [rank for rank in range(self.size) if counters[rank] < operation]
                dead = [rank for rank in late if not _alive(self.pids[rank])]
                if dead or (late and now - begun > self.timeout):
                    raise self._lost((dead or late)[0])

    def _lost(self, peer: int) -> PeerLostError:
        return PeerLostError(
            f"stops in a collective: rank {peer} of its group failed, died or did not come within {self.timeout:g} s "
            "(see its own traceback)"
        )


def _machine() -> str | None:
    """Names the machine as far as memory is concerned; None where this module cannot be used."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    usable = hasattr(os, "memfd_create") and platform.machine() in ("x86_64", "AMD64")
    return f"{boot} {space}" if usable else None


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
