"""Collectives over shared memory, for ranks that compute on the CPUs of one machine.

Over gloo, bytes between two processes of one machine go through the loopback network and its threads. Here every rank
has an *arena* in shared memory that all ranks map: to send is to copy into one's own arena and to say so; to receive is
to read the peers' arenas. What is said goes through a small *board* of counters::

    board     started[r]    operations that rank r has put into its arena
              finished[r]   operations whose peers' parts rank r has read (or no longer needs)
              reduced[r]    operations of which rank r has published its reduced chunk
              offset[r][i]  where operation i of rank r lies in its arena

    all-gather       copy own chunk in | wait started   | copy the peers' chunks out          | finished
    reduce-scatter   copy chunks in    | wait started   | add up own chunk from all arenas    | finished
    all-reduce       copy all in       | wait started   | as reduce-scatter, chunk back in, wait reduced, copy out

Sums are made in rank order, so all ranks get the same bits. Waiting is polling with short sleeps: a rank that waits has
nothing else to do. A peer that has died is noticed by its process id.

Memory order rests on x86, whose stores become visible in program order; elsewhere, between machines, and where shared
memory is short (containers), gloo is used: all ranks agree on that.
"""

import itertools
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.comm.collectives import Pending
from lightning_dist.core.errors import PeerLostError

FOLDER = Path("/dev/shm")
OPERATIONS_IN_FLIGHT = 8
"""Operations of the largest size that an arena has room for: the engines keep three open, a peer lags by as many."""
BOARD_ROWS, SLOTS = 3, 4096
ALIGNMENT = 64
MARGIN = 2
"""Arenas are made where so many times their size is free."""
SPINS, NAP, LOOK_FOR_THE_DEAD = 200, 20e-6, 0.2
STARTED, FINISHED, REDUCED = range(BOARD_ROWS)


@dataclass
class _Lent:
    """A part of the own arena that peers may still read."""

    operation: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Sent:
    """An operation under way, and the arenas that it began in."""

    number: int
    arenas: list[Tensor]


@dataclass(eq=False)
class SharedMemory:
    """One channel of collectives between the ranks of a group; operations match by their order."""

    group: dist.ProcessGroup
    pids: list[int]
    board: "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
    timeout: float
    capacity: int = 0
    refused: int = 1 << 62  # operations of this size and above found no memory
    arenas: list[Tensor] = field(default_factory=list)
    lent: list[_Lent] = field(default_factory=list)
    done: set[int] = field(default_factory=set)  # finished here, after one that is not
    count: int = 0

    @property
    def spins(self) -> int:
        """Looks before the first nap: none to speak of where ranks share cores."""
        return SPINS if self.size <= (os.cpu_count() or 1) else 5

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return int(self.group.size())

    @classmethod
    def connect(cls, group: dist.ProcessGroup, *, timeout: float) -> "SharedMemory | None":
        """Join the ranks of a gloo group over shared memory; None, on all of them, where that cannot be. Collective."""
        rows = BOARD_ROWS + SLOTS
        said: list[object] = [None] * group.size()
        mine = (_machine(), os.getpid())
        dist.all_gather_object(said, mine, group=group)
        alike = len({entry[0] for entry in said if isinstance(entry, tuple)}) == 1 and mine[0] is not None
        pids = [int(entry[1]) for entry in said if isinstance(entry, tuple)]
        if not _agree(group, alike and all(map(_alive, pids))):
            return None
        files = _share(group, 8 * rows * group.size(), common=True)
        if files is None:
            return None
        board = files[0].view(torch.int64).numpy().reshape(rows, group.size())
        return cls(group, pids, board, timeout)

    # Collectives ----------------------------------------------------------------------------------------------

    def fits(self, num_bytes: int) -> bool:
        """Whether an operation that copies so many bytes in can be done here; local, the same answer on all ranks."""
        return num_bytes <= self.capacity // OPERATIONS_IN_FLIGHT

    def reserve(self, num_bytes: int) -> bool:
        """Grow the arenas until such an operation fits, if there is memory for it. Collective, and it blocks: only
        where all ranks are known to be at this point, never where one may be waiting for another elsewhere."""
        if self.fits(num_bytes):
            return True
        if num_bytes >= self.refused:
            return False
        room = 1 << max(16, (_aligned(num_bytes) * OPERATIONS_IN_FLIGHT - 1).bit_length())
        arenas = _share(self.group, room, common=False)
        if arenas is None:
            self.refused = num_bytes
            return False
        self.arenas, self.capacity = arenas, room  # operations under way keep the old ones
        self.lent.clear()
        return True

    def all_gather(self, flat: Tensor) -> Pending:
        """See `collectives.all_gather`."""
        chunks = flat.chunk(self.size)
        sent = self._publish([chunks[self.rank]])

        def finish() -> None:
            self._wait(STARTED, sent.number)
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
            self._wait(STARTED, sent.number)
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
            self._wait(STARTED, sent.number)
            add_up(flat, sent)
            if scale != 1.0:
                flat.mul_(scale)
            self._finished(sent)

        return Pending((), finish)

    def _add_pair(self, flat: Tensor, sent: "_Sent") -> None:
        """Two ranks: what is here and what is there; addition does not see which is first."""
        flat.add_(self._read(sent, 1 - self.rank, 0, flat))

    def _add_chunks(self, flat: Tensor, sent: "_Sent") -> None:
        """Each rank adds up one chunk and puts it back into its arena, from where the others read it."""
        bounds = [flat.numel() * rank // self.size for rank in range(self.size + 1)]
        chunks = [flat[start:stop] for start, stop in itertools.pairwise(bounds)]
        own, start = chunks[self.rank], bounds[self.rank]
        parts = [own if peer == self.rank else self._read(sent, peer, start, own) for peer in range(self.size)]
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        self._read(sent, self.rank, start, own).copy_(total)
        self.board[REDUCED, self.rank] = sent.number
        own.copy_(total)
        self._wait(REDUCED, sent.number)
        for peer, chunk in enumerate(chunks):
            if peer != self.rank:
                chunk.copy_(self._read(sent, peer, bounds[peer], chunk))

    # The arena ------------------------------------------------------------------------------------------------

    def _publish(self, pieces: Sequence[Tensor]) -> "_Sent":
        """Put tensors of one dtype into the own arena, one after the other."""
        like = pieces[0]
        num_bytes = sum(piece.numel() for piece in pieces) * like.element_size()
        start = self._room(_aligned(num_bytes))
        place = self.arenas[self.rank][start : start + num_bytes].view(like.dtype)
        torch.cat(list(pieces), out=place) if len(pieces) > 1 else place.copy_(like)
        self.count += 1
        self.lent.append(_Lent(self.count, start, start + _aligned(num_bytes)))
        self.board[BOARD_ROWS + self.count % SLOTS, self.rank] = start
        self.board[STARTED, self.rank] = self.count
        return _Sent(self.count, self.arenas)

    def _read(self, sent: "_Sent", peer: int, element: int, like: Tensor) -> Tensor:
        """What a peer has published in an operation, from an element on, as a tensor like `like`."""
        size = like.element_size()
        start = int(self.board[BOARD_ROWS + sent.number % SLOTS, peer]) + element * size
        return sent.arenas[peer][start : start + like.numel() * size].view(like.dtype)

    def _finished(self, sent: "_Sent") -> None:
        """The peers' parts were read. Operations may finish in any order; peers hear of those with none open before."""
        self.done.add(sent.number)
        number = int(self.board[FINISHED, self.rank])
        while number + 1 in self.done:
            number += 1
            self.done.remove(number)
        self.board[FINISHED, self.rank] = number

    def _room(self, num_bytes: int) -> int:
        """The lowest free place of the arena; waits for peers that still read what lies there."""
        while True:
            done = int(self.board[FINISHED].min())
            self.lent = [lent for lent in self.lent if lent.operation > done]
            start = 0
            for lent in sorted(self.lent, key=lambda lent: lent.start):
                if lent.start - start >= num_bytes:
                    break
                start = max(start, lent.stop)
            if start + num_bytes <= self.capacity and self.count - done < SLOTS - 1:
                return start
            self._wait(FINISHED, done + 1)

    # Waiting --------------------------------------------------------------------------------------------------

    def _wait(self, row: int, operation: int) -> None:
        """Until every rank's counter has come this far.

        Raises:
            PeerLostError: a rank has died, or nothing has happened for the whole time limit.
        """
        counters = self.board[row]
        for _ in range(self.spins):
            if counters.min() >= operation:
                return
        begun = looked = time.monotonic()
        while counters.min() < operation:
            time.sleep(NAP)
            now = time.monotonic()
            if now - looked > LOOK_FOR_THE_DEAD:
                looked = now
                late = [rank for rank in range(self.size) if counters[rank] < operation]
                if any(not _alive(self.pids[rank]) for rank in late) or now - begun > self.timeout:
                    raise PeerLostError(
                        f"stops in a collective: rank {late[0]} of its group failed, died or did not come within "
                        f"{self.timeout:g} s (see its own traceback)"
                    )


def _aligned(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT


def _machine() -> str | None:
    """Names the machine as far as memory is concerned; None where this module cannot be used."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
        usable = FOLDER.is_dir() and os.access(FOLDER, os.W_OK) and platform.machine() in ("x86_64", "AMD64")
    except OSError:
        return None
    return f"{boot} {space} {FOLDER.stat().st_dev}" if usable else None


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _agree(group: dist.ProcessGroup, fine: bool) -> bool:
    """Whether all ranks are fine."""
    flag = torch.tensor([int(fine)])
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def _share(group: dist.ProcessGroup, num_bytes: int, *, common: bool) -> list[Tensor] | None:
    """Shared memory of `num_bytes`, one piece (`common`) or one of each rank; None on all ranks where it is short.

    The files have no name any more when this returns, so nothing is left behind whatever happens.
    """
    path = ""
    if not common or group.rank() == 0:
        path = _create(num_bytes, 1 if common else group.size())
    paths: list[object] = [None] * group.size()
    dist.all_gather_object(paths, path, group=group)
    named = [str(p) for p in (paths[:1] if common else paths)]
    pieces: list[Tensor] = []
    fine = all(named)
    if fine:
        try:
            pieces = [torch.from_file(p, shared=True, size=num_bytes, dtype=torch.uint8) for p in named]
        except (OSError, RuntimeError):
            fine = False
    fine = _agree(group, fine)
    if path:
        os.unlink(path)
    return pieces if fine else None


def _create(num_bytes: int, ranks: int) -> str:
    """A file of so many bytes in shared memory; "" where `ranks` such files are too much for what is free.

    Pages come when they are first written, and arenas fill from below, so what is used is what is under way. Writing
    where no page is left kills the process: therefore the margin.
    """
    if num_bytes * ranks * MARGIN > _free_bytes():
        return ""
    handle, path = tempfile.mkstemp(prefix="lightning_dist-", dir=FOLDER)
    try:
        os.ftruncate(handle, num_bytes)
    finally:
        os.close(handle)
    return path


def _free_bytes() -> int:
    """What is left of shared memory."""
    state = os.statvfs(FOLDER)
    return state.f_bavail * state.f_frsize
