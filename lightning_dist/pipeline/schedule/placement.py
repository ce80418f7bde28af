"""Which rank holds which stage.

With p ranks and v stages on each (S = p v stages in all)::

    linear    v = 1   stage s on rank s                         p = 4:   0   1   2   3
    looped            stage s on rank s mod p                   v = 2:  0 4 1 5 2 6 3 7
    V-shaped          the stages turn round at the last rank    v = 2:  0 7 1 6 2 5 3 4

In a V the first and the last stage share rank 0: the loss is computed where the input enters, and at each turn two
neighbouring stages lie on one rank, which saves a message.
"""

from enum import Enum


class Placement(Enum):
    """The order in which the stages go over the ranks."""

    LINEAR = "linear"
    LOOPED = "looped"
    V_SHAPED = "v-shaped"

    def stages(self, rank: int, num_ranks: int, virtual_stages: int) -> list[int]:
        """The stages of a rank, in the order in which a micro-batch passes them."""
        if self is Placement.V_SHAPED:
            return [
                turn * num_ranks + (rank if turn % 2 == 0 else num_ranks - 1 - rank) for turn in range(virtual_stages)
            ]
        return [turn * num_ranks + rank for turn in range(virtual_stages)]
