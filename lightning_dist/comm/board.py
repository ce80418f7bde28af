"""A board: numbers that the ranks of a group, on one machine, all read and write, and waiting for them to change.

Whoever owns a number writes it, the others look. Waiting is polling with short sleeps: a rank that waits has nothing
else to do. A peer that has died is noticed by its process id, one that failed and lives on by the `alarm`, and ranks
that wait for each other by the `watch`.

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
from lightning_dist.comm.watch import Watch
from lightning_dist.core.errors import PeerLostError

SPIN, NAP, LONGEST_NAP, LOOK_AROUND, PATIENCE = 3e-4, 20e-6, 1e-3, 0.2, 1.0  # seconds
CORES = os.cpu_count() or 1  # to ask takes longer than many a wait

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Terms:
    """On which terms ranks of one machine talk through its memory.

    Args:
        timeout: seconds that a rank waits for another before it is an error.
        alarm: what a rank that waits listens to.
        watch: where it notes for whom it waits.
    """

    timeout: float
    alarm: Alarm | None = None
    watch: Watch | None = None


@dataclass(eq=False)
class Board:
    """The numbers of a group, all 0 at first, and the segments of its ranks (see `arena`) that are known here."""

    neighbours: Neighbours
    pids: list[int]
    numbers: Numbers
    terms: Terms
    ranks: list[int]  # of the world
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
        ranks = dist.get_process_group_ranks(group)
        return cls(neighbours, pids, mapped(handle).view(torch.int64).numpy(), terms, ranks)

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
                raise self.lost(peer, "has hung up: it is ending, or has dropped its mesh") from error
        return known[number]

    def wait(self, ready: Callable[[], bool], late: Callable[[], list[int]]) -> None:
        """Until something is so; `late` are the ranks of the group that keep it from being so.

        Raises:
            PeerLostError: one of these has died or does not come in time, or any rank of the world has aborted.
            RankMismatchError: the ranks wait for each other; see `watch`.
        """
        spin = SPIN if self.size <= CORES else 0.0  # where ranks share cores, nap at once
        begun = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now - begun < spin:
                continue
            if self.terms.alarm is not None:
                self.terms.alarm.listen()
            if now - begun > LOOK_AROUND:
                self._wait_long(ready, late, begun)
                return
            time.sleep(min(max(NAP, (now - begun) / 20), LONGEST_NAP))  # a wait becomes a twentieth longer at most

    def _wait_long(self, ready: Callable[[], bool], late: Callable[[], list[int]], begun: float) -> None:
        """Look now and then whether those who are late are alive, and for whom they wait."""
        looked, watch = 0.0, self.terms.watch
        if watch is not None:
            watch.begin(f"in a collective of ranks {self.ranks} or waiting for a message of one")
        try:
            while not ready():
                now = time.monotonic()
                if self.terms.alarm is not None:
                    self.terms.alarm.listen()
                if now - looked > LOOK_AROUND:
                    looked, missing = now, late()
                    dead = [rank for rank in missing if not alive(self.pids[rank])]
                    if (dead or (missing and now - begun > self.terms.timeout)) and not ready():
                        raise self.lost((dead or missing)[0])
                    if watch is not None and missing and now - begun > PATIENCE:
                        watch.look([self.ranks[rank] for rank in missing], ready)
                time.sleep(LONGEST_NAP)
        finally:
            if watch is not None:
                watch.end()

    def lost(self, peer: int, if_alive: str = "") -> PeerLostError:
        """What to raise when a peer is not there: what is known of it."""
        if not alive(self.pids[peer]):
            what = f"has died: its process {self.pids[peer]} is gone. It was killed, or its own traceback says why"
        else:
            what = if_alive or (
                f"is alive as process {self.pids[peer]}, but did not come within {self.terms.timeout:g} s: it is busy "
                "or waits for something else. If it only needs longer, give the strategy a larger timeout"
            )
        return PeerLostError(f"stops in a collective or waiting for a message: rank {peer} of its group {what}")
