"""Ranks that wait for each other in a circle find out, and say where each of them is.

A collective that only some ranks call need not meet another one: a rank that alone reads a tensor of which its peers
hold parts waits for them, and they wait for it elsewhere, in a roll call of the world or for a message. Nobody is
late, nobody is dead, and the time limit is far. So whoever has waited for a while notes down for whom, and looks at
what the others have noted::

    rank 0   reading a cut parameter, waits for rank 1
    rank 1   at the end of a backward pass, waits for rank 0        ->  a circle

What is read may be old: a rank may have got what it noted and be slow to go on. So each rank of the circle first
confirms it, having looked once more whether it can go on; as all of them were waiting by then, what they saw stays so.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from lightning_dist.comm.alarm import Alarm
from lightning_dist.comm.machine_memory import MachineMemory
from lightning_dist.core.errors import RankMismatchError

WORDS = 160
"""Bytes that say where a rank is."""
HEAD = 2
"""Numbers of a row: a serial number, odd while the rank waits, and the circle that it has confirmed."""


@dataclass(eq=False)
class Watch:
    """See the module docstring. `place` is where this rank says it is when it waits next."""

    rank: int
    memory: MachineMemory
    alarm: Alarm
    place: str = ""

    @staticmethod
    def row_bytes(world_size: int) -> int:
        """Memory for each rank."""
        return 8 * HEAD + -(-world_size // 8) * 8 + WORDS

    def __post_init__(self) -> None:
        self.me = self.memory.ranks.index(self.rank)
        self.numbers = self.memory.rows[:, : 8 * HEAD].view(np.int64)
        self.awaited = self.memory.rows[:, 8 * HEAD : -WORDS]  # a byte for each rank of the machine
        self.words = self.memory.rows[:, -WORDS:]

    def begin(self, words: str) -> None:
        """This rank waits."""
        text = np.frombuffer((self.place or words).encode()[:WORDS], np.uint8)
        self.words[self.me] = 0
        self.words[self.me, : len(text)] = text
        self.awaited[self.me] = 0
        self.numbers[self.me, 0] += 1

    def end(self) -> None:
        """It does not wait any more."""
        self.numbers[self.me, 0] += 1

    def look(self, missing: Iterable[int], ready: Callable[[], bool]) -> None:
        """Note that these ranks of the world are waited for.

        Raises:
            RankMismatchError: they, and those for whom they wait, wait for this one.
        """
        noted = np.zeros_like(self.awaited[self.me])
        noted[[self.memory.ranks.index(rank) for rank in missing if rank in self.memory.ranks]] = 1
        self.awaited[self.me] = noted
        circle = self._circle()
        if not circle:
            return
        seal = hash(tuple((index, int(self.numbers[index, 0])) for index in sorted(circle)))
        if ready():
            return
        self.numbers[self.me, 1] = seal
        if all(int(self.numbers[index, 1]) == seal for index in circle):
            said = "; ".join(f"rank {self.memory.ranks[index]} is {self._said(index)}" for index in circle)
            error = RankMismatchError(
                f"the ranks wait for each other and would do so forever: {said}. What communicates must be called on "
                "all ranks: remove conditions such as `if rank == 0:` around it"
            )
            self.alarm.ring(f"RankMismatchError: {error}")
            raise error

    def _circle(self) -> list[int]:
        """The shortest way from this rank over ranks that wait, and back; empty if there is none."""
        came_from = {self.me: self.me}
        front = [self.me]
        while front:
            reached = []
            for index in front:
                if self.numbers[index, 0] % 2 == 0:
                    continue
                for other in np.flatnonzero(self.awaited[index]).tolist():
                    if other == self.me:
                        way = [index]
                        while way[-1] != self.me:
                            way.append(came_from[way[-1]])
                        return way[::-1]
                    if other not in came_from:
                        came_from[other] = index
                        reached.append(other)
            front = reached
        return []

    def _said(self, index: int) -> str:
        return self.words[index].tobytes().rstrip(b"\0").decode(errors="ignore") or "waiting"
