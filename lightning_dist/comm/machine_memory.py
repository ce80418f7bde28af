"""A piece of memory that all ranks of the world on one machine map, with a row for each of them."""

import contextlib
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from lightning_dist.comm.arena import mapped, new_handle
from lightning_dist.comm.neighbours import Neighbours, machine, said_by_all

Bytes = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class MachineMemory:
    """`rows[i]` belongs to rank ``ranks[i]`` of the world; all zeros at first."""

    ranks: list[int]
    rows: Bytes

    @classmethod
    def connect(cls, world: dist.ProcessGroup, row_bytes: int) -> "MachineMemory | None":
        """Join the ranks that share this rank's machine; None where no shared memory can be used. Collective."""
        machines = said_by_all(machine(), world)
        if None in machines:
            return None
        ranks = [rank for rank, other in enumerate(machines) if other == machines[world.rank()]]

        def exchange(mine: object) -> list[object]:
            said = said_by_all(mine, world)
            return [said[rank] for rank in ranks]

        neighbours: Neighbours | None = None
        with contextlib.suppress(OSError):
            neighbours = Neighbours.meet(ranks.index(world.rank()), len(ranks), exchange)
        if not all(exchange(neighbours is not None)) or neighbours is None:
            return None
        memory = mapped(neighbours.share(lambda: new_handle(row_bytes * len(ranks)))).numpy()
        return cls(ranks, memory.reshape(len(ranks), row_bytes))
