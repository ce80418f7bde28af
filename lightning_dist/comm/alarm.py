"""One alarm per machine: a rank that failed, while its process lives on, says so to all that wait in shared memory.

A rank in shared memory waits for numbers to grow; that a peer has died is seen by its process id, but a peer whose code
raised may live for long: in a notebook, in a handler, in the teardown of a Trainer. So whoever waits also looks here.
The first rank that rings is the cause; what others say later follows from it. It rings until all ranks have met again
(`Mesh.recover`).
"""

import time
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from lightning_dist.comm.machine_memory import MachineMemory
from lightning_dist.core.errors import PeerLostError

LETTERS = 1000
"""Bytes of a reason that are passed on."""


@dataclass(eq=False)
class Alarm:
    """Seen by all ranks of the world that run on this machine.

    `rung` holds when each of them rang, in nanoseconds of the machine's clock, or 0.
    """

    rank: int
    ranks: list[int]
    rung: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    reasons: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]"

    @classmethod
    def connect(cls, world: dist.ProcessGroup) -> "Alarm | None":
        """Join the ranks that share this rank's machine; None where no shared memory can be used. Collective."""
        memory = MachineMemory.connect(world, 8 + LETTERS)
        if memory is None:
            return None
        return cls(world.rank(), memory.ranks, memory.rows[:, :8].view(np.int64)[:, 0], memory.rows[:, 8:])

    def ring(self, reason: str) -> None:
        """Tell all that this rank has failed. Only the first call counts."""
        me = self.ranks.index(self.rank)
        if not self.rung[me]:
            words = np.frombuffer(reason.encode()[:LETTERS], np.uint8)
            self.reasons[me, : len(words)] = words
            self.rung[me] = time.monotonic_ns()

    @property
    def rings(self) -> bool:
        """Whether any rank has failed."""
        return bool(self.rung.any())

    def silence(self) -> None:
        """Take back this rank's own alarm. For all ranks between two barriers."""
        me = self.ranks.index(self.rank)
        self.rung[me] = 0
        self.reasons[me] = 0

    def listen(self) -> None:
        """Raises PeerLostError once a rank has rung; it names the first one and its reason."""
        if not self.rings:
            return
        first = min((when, index) for index, when in enumerate(self.rung.tolist()) if when)[1]
        reason = self.reasons[first].tobytes().rstrip(b"\0").decode(errors="ignore")
        who = "this rank" if self.ranks[first] == self.rank else f"rank {self.ranks[first]} of the world"
        raise PeerLostError(
            f"stops because {who} has failed: {reason or 'no reason given'} (see its own traceback). "
            "Nothing goes on before all ranks begin anew: start them again, or call the Trainer again on all of them"
        )
