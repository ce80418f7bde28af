"""Mail through the memory of one machine: one copy in, one copy out.

A rank has an arena for every peer, which only that peer maps, and a board says for every line (sender, receiver,
channel) how far each end has come::

    board     sent          messages that lie in the sender's arena
              taken         messages that the receiver has copied out, with none before them open
              place[i]      where message i lies: number of the segment, first byte; and its digest, or its length

The sender frees what was taken when it sends next. Nobody waits but the one who opens a letter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import Tensor

from lightning_dist.comm.arena import Arena
from lightning_dist.comm.board import Board, Terms
from lightning_dist.comm.mail import LINES, OBJECTS, Open, Packing

SENT, TAKEN, PLACES = 0, 8, 16
"""Where the numbers of a line lie; those of the two ends on cache lines of their own."""
SLOTS, WORDS = 4096, 3
"""Messages of a line that may be under way at once, and numbers that describe one of them."""
LENGTH = PLACES + SLOTS * WORDS


@dataclass(eq=False)
class Line:
    """One direction between two ranks on one channel, as one of them sees it."""

    numbers: "memoryview[int]"
    count: int = 0  # sent, or expected, so far
    freed: int = 0  # of what was sent
    done: set[int] = field(default_factory=set)  # opened, after one that is not

    def slot(self, number: int) -> int:
        """Where the description of a message begins."""
        return PLACES + number % SLOTS * WORDS


@dataclass(eq=False)
class SharedCarrier:
    """See `mail.Carrier`."""

    board: Board
    arenas: dict[int, Arena]
    outgoing: dict[tuple[int, str], Line]
    incoming: dict[tuple[int, str], Line]

    @classmethod
    def connect(cls, group: dist.ProcessGroup, terms: Terms) -> "SharedCarrier | None":
        """Join the ranks of a gloo group; None, on all of them, where that cannot be. Collective."""
        size = group.size()
        board = Board.connect(group, size * size * len(LINES) * LENGTH, terms)
        if board is None:
            return None
        me, peers = board.rank, [peer for peer in range(size) if peer != board.rank]

        def line(sender: int, receiver: int, name: str) -> Line:
            index = (sender * size + receiver) * len(LINES) + LINES.index(name)
            return Line(board.numbers[index * LENGTH : (index + 1) * LENGTH].data)

        def announce(peer: int, handle: int) -> None:
            board.neighbours.send_handle(handle, [peer])

        return cls(
            board,
            {peer: Arena(partial(announce, peer)) for peer in peers},
            {(peer, name): line(me, peer, name) for peer in peers for name in LINES},
            {(peer, name): line(peer, me, name) for peer in peers for name in LINES},
        )

    def send(self, tensors: Sequence[Tensor], peer: int, line: str) -> None:
        """See `Carrier`."""
        packing = Packing.of(tensors)
        packing.pack(tensors, *self._lend(packing.num_bytes, packing.digest, peer, line))
        self._sent(peer, line)

    def post(self, packing: Packing, peer: int, line: str) -> Open:
        """See `Carrier`."""
        number = self._expect(peer, line)

        def open_it() -> list[Tensor]:
            segment, start, digest = self._arrival(number, peer, line)
            packing.insist_on(digest, peer)
            out = [view.clone() for view in packing.views(self.board.segment(peer, segment), start)]
            self._taken(number, peer, line)
            return out

        return open_it

    def send_bytes(self, data: bytes, peer: int) -> None:
        """See `Carrier`."""
        memory, start = self._lend(len(data), len(data), peer, OBJECTS)
        memory.numpy().data[start : start + len(data)] = data
        self._sent(peer, OBJECTS)

    def receive_bytes(self, peer: int) -> bytes:
        """See `Carrier`."""
        number = self._expect(peer, OBJECTS)
        segment, start, length = self._arrival(number, peer, OBJECTS)
        data = self.board.segment(peer, segment)[start : start + length].numpy().tobytes()
        self._taken(number, peer, OBJECTS)
        return data

    def flush(self) -> None:
        """See `Carrier`; what was sent lies in shared memory, so there is nothing to wait for."""

    def forget(self) -> bool:
        """See `Carrier`."""
        for (peer, name), line in self.outgoing.items():
            for number in range(line.freed + 1, line.count + 1):
                self.arenas[peer].take_back((name, number))
            line.numbers[SENT] = line.count = line.freed = 0
        for line in self.incoming.values():
            line.numbers[TAKEN] = line.count = 0
            line.done.clear()
        return True

    # The sender's end -----------------------------------------------------------------------------------------

    def _lend(self, num_bytes: int, note: int, peer: int, name: str) -> tuple[Tensor, int]:
        """A segment and the byte of it where the next message of a line is to lie; described, not yet announced."""
        arena, line = self.arenas[peer], self.outgoing[peer, name]
        for other in LINES:
            self._free(arena, peer, other)
        if line.count - line.freed >= SLOTS:
            raise RuntimeError(
                f"{SLOTS} messages are under way to rank {peer} on the channel {name} and it has taken none of them"
            )
        number = line.count + 1
        place = arena.lend((name, number), num_bytes)
        slot = line.slot(number)
        line.numbers[slot], line.numbers[slot + 1], line.numbers[slot + 2] = place.segment, place.start, note
        return arena.segments[place.segment], place.start

    def _sent(self, peer: int, name: str) -> None:
        line = self.outgoing[peer, name]
        line.count += 1
        line.numbers[SENT] = line.count

    def _free(self, arena: Arena, peer: int, name: str) -> None:
        line = self.outgoing[peer, name]
        taken = line.numbers[TAKEN]
        while line.freed < taken:
            line.freed += 1
            arena.take_back((name, line.freed))

    # The receiver's end ---------------------------------------------------------------------------------------

    def _expect(self, peer: int, name: str) -> int:
        line = self.incoming[peer, name]
        line.count += 1
        return line.count

    def _arrival(self, number: int, peer: int, name: str) -> tuple[int, int, int]:
        """Wait for a message; its description."""
        line = self.incoming[peer, name]
        numbers = line.numbers
        self.board.wait(lambda: numbers[SENT] >= number, lambda: [peer] if numbers[SENT] < number else [])
        slot = line.slot(number)
        return numbers[slot], numbers[slot + 1], numbers[slot + 2]

    def _taken(self, number: int, peer: int, name: str) -> None:
        line = self.incoming[peer, name]
        line.done.add(number)
        through = line.numbers[TAKEN]
        while through + 1 in line.done:
            through += 1
            line.done.remove(through)
        line.numbers[TAKEN] = through
