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
    broadcast        source: copy in   | wait started   | others: copy out                    | finished
    pieces           copy own piece in | wait started   | copy those wanted out               | finished

To start an operation never waits: an arena that is full grows, and the peers map the new segment when they come to read
it. So operations may be started in the middle of anything. Sums are made in rank order, so all ranks get the same bits.
Where there can be no board, gloo is used.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.comm.arena import Arena
from lightning_dist.comm.board import Board, Terms
from lightning_dist.comm.collectives import Pending

COUNTERS, SLOTS, WORDS = 3, 4096, 2
"""Rows of counters, operations that may be open at once, and numbers that say where one of them lies."""
STARTED, FINISHED, REDUCED = range(COUNTERS)

Rows = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@dataclass(eq=False)
class SharedMemory:
    """One channel of collectives between the ranks of a group; operations match by their order."""

    board: Board
    rows: Rows
    arena: Arena
    done: set[int] = field(default_factory=set)  # finished here, after one that is not
    count: int = 0
    freed: int = 0

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.board.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.board.size

    @classmethod
    def connect(cls, group: dist.ProcessGroup, terms: Terms) -> "SharedMemory | None":
        """Join the ranks of a gloo group over shared memory; None, on all of them, where that cannot be. Collective."""
        board = Board.connect(group, (COUNTERS + SLOTS * WORDS) * group.size(), terms)
        if board is None:
            return None
        return cls(board, board.numbers.reshape(-1, board.size), Arena(board.neighbours.send_handle))

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

    def broadcast(self, flat: Tensor, source: int) -> Pending:
        """Start ``flat = flat of a rank``."""
        sent = self._publish([flat] if self.rank == source else [flat[:0]])

        def finish() -> None:
            self._wait(STARTED, sent)
            if self.rank != source:
                flat.copy_(self._read(sent, source, 0, flat))
            self._finished(sent)

        return Pending((), finish)

    def pieces(self, piece: Tensor, parts: Sequence[Tensor] | None) -> Pending:
        """Start to copy every rank's flat piece into this rank's `parts`, in rank order; None takes none of them."""
        sent = self._publish([piece])

        def finish() -> None:
            self._wait(STARTED, sent)
            for peer, part in enumerate(parts or ()):
                part.copy_(piece if peer == self.rank else self._read(sent, peer, 0, part))
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
        self.rows[REDUCED, self.rank] = sent
        own.copy_(total)
        self._wait(REDUCED, sent)
        for peer, chunk in enumerate(chunks):
            if peer != self.rank:
                chunk.copy_(self._read(sent, peer, bounds[peer], chunk))

    def forget(self) -> None:
        """Operations that were started here count no more. For all ranks between two barriers; see `Mesh.recover`."""
        self.rows[:COUNTERS, self.rank] = 0
        for number in range(self.freed + 1, self.count + 1):
            self.arena.take_back(number)
        self.done.clear()
        self.count = self.freed = 0

    # Sending and reading --------------------------------------------------------------------------------------

    def _publish(self, pieces: Sequence[Tensor]) -> int:
        """Put tensors of one dtype into the own arena, one after the other; the number of the operation."""
        like = pieces[0]
        through = int(self.rows[FINISHED].min())
        for number in range(self.freed + 1, through + 1):
            self.arena.take_back(number)
        self.freed = through
        if self.count + 1 - through >= SLOTS:
            raise RuntimeError(f"{SLOTS} collectives were started and none of them was waited for")
        self.count += 1
        place = self.arena.lend(self.count, sum(piece.numel() for piece in pieces) * like.element_size())
        target = self.arena.segments[place.segment][place.start : place.stop].view(like.dtype)
        torch.cat(list(pieces), out=target) if len(pieces) > 1 else target.copy_(like)
        self.rows[self._slot(self.count), self.rank] = place.segment, place.start
        self.rows[STARTED, self.rank] = self.count
        return self.count

    def _slot(self, number: int) -> slice:
        first = COUNTERS + number % SLOTS * WORDS
        return slice(first, first + WORDS)

    def _read(self, number: int, peer: int, element: int, like: Tensor) -> Tensor:
        """What a peer has published in an operation, from an element on, as a tensor like `like`."""
        segment, start = map(int, self.rows[self._slot(number), peer])
        memory = self.arena.segments[segment] if peer == self.rank else self.board.segment(peer, segment)
        size = like.element_size()
        start += element * size
        return memory[start : start + like.numel() * size].view(like.dtype)

    def _finished(self, number: int) -> None:
        """The peers' parts were read. Operations may finish in any order; peers hear of those with none open before."""
        self.done.add(number)
        through = int(self.rows[FINISHED, self.rank])
        while through + 1 in self.done:
            through += 1
            self.done.remove(through)
        self.rows[FINISHED, self.rank] = through

    def _wait(self, row: int, operation: int) -> None:
        """Until every rank's counter has come this far; see `Board.wait`."""
        counters = self.rows[row]
        self.board.wait(
            lambda: bool(counters.min() >= operation),
            lambda: [rank for rank in range(self.size) if counters[rank] < operation],
        )
