"""A board: numbers that the ranks of a group, on one machine, all read and write, and waiting for them to change.

Whoever owns a number writes it, the others look. Waiting is polling with short sleeps: a rank that waits has nothing
else to do. A peer that has died is noticed by its process id, one that failed and lives on by the `alarm`.

Memory order rests on x86, whose stores become visible in program order; elsewhere, and between machines, there are no
boards: all ranks agree on that.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.comm.alarm import Alarm
from lightning_dist.comm.arena import mapped, new_handle
from lightning_dist.comm.neighbours import Neighbours, alive, machine, said_by_all
from lightning_dist.core.errors import PeerLostError

SPIN, NAP, LONGEST_NAP, LOOK_FOR_THE_DEAD = 3e-4, 20e-6, 1e-3, 0.2  # seconds
CORES = os.cpu_count() or 1  # to ask takes longer than many a wait

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Terms:
    """On which terms ranks of one machine talk through its memory.

    Args:
        timeout: seconds that a rank waits for another before it is an error.
        alarm: what a rank that waits listens to.
    """

    timeout: float
    alarm: Alarm | None = None


@dataclass(eq=False)
class Board:
    """The numbers of a group, all 0 at first, and the segments of its ranks (see `arena`) that are known here."""

    neighbours: Neighbours
    pids: list[int]
    numbers: Numbers
    terms: Terms
    segments: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.neighbours.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.pids)

    @classmethod
    def connect(cls, group: dist.ProcessGroup, words: int, terms: Terms) -> "Board | None":
        """Join the ranks of a gloo group by a board of so many numbers. Collective.

        Returns:
            None, on all of them, where that cannot be.
        """
        machines = said_by_all(machine(), group)
        pids = [int(str(pid)) for pid in said_by_all(os.getpid(), group)]
        if None in machines or len(set(machines)) > 1:
            return None
        neighbours: Neighbours | None = None
        with contextlib.suppress(OSError):
            neighbours = Neighbours.meet(group.rank(), group.size(), lambda mine: said_by_all(mine, group))
        if not all(said_by_all(neighbours is not None, group)) or neighbours is None:
            return None
        handle = neighbours.share(lambda: new_handle(8 * words))
        return cls(neighbours, pids, mapped(handle).view(torch.int64).numpy(), terms)

    def segment(self, peer: int, number: int) -> Tensor:
        """A peer's segment; it was announced before anything in it was spoken of.

        Raises:
            PeerLostError: the peer has gone.
        """
        known = self.segments.setdefault(peer, [])
        while len(known) <= number:
            try:
                known.append(mapped(self.neighbours.receive_handle(peer)))
            except OSError as error:
                raise self.lost(peer) from error
        return known[number]

    def wait(self, ready: Callable[[], bool], late: Callable[[], list[int]]) -> None:
        """Until something is so; `late` are the ranks of the group that keep it from being so.

        Raises:
            PeerLostError: one of these has died or does not come in time, or any rank of the world has aborted.
        """
        spin = SPIN if self.size <= CORES else 0.0  # where ranks share cores, nap at once
        begun = looked = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now - begun < spin:
                continue
            if self.terms.alarm is not None:
                self.terms.alarm.listen()
            time.sleep(min(max(NAP, (now - begun) / 20), LONGEST_NAP))  # a wait becomes a twentieth longer at most
            if now - looked > LOOK_FOR_THE_DEAD:
                looked = now
                missing = late()
                dead = [rank for rank in missing if not alive(self.pids[rank])]
                if (dead or (missing and now - begun > self.terms.timeout)) and not ready():
                    raise self.lost((dead or missing)[0])

    def lost(self, peer: int) -> PeerLostError:
        """What to raise when a peer is not there."""
        return PeerLostError(
            f"stops in a collective or waiting for a message: rank {peer} of its group failed, died or did not come "
            f"within {self.terms.timeout:g} s (see its own traceback)"
        )
