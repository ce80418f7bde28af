"""The ZeRO stages as one table.

ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sec. 5)
removes copies step by step. What rests where is a row of placements; every collective follows from a change of
placement, so no engine code asks for a stage number::

    SHARD   -> REPLICATE   all-gather
    PARTIAL -> SHARD       reduce-scatter
    PARTIAL -> REPLICATE   all-reduce

With PARTIAL gradients each rank sums its own micro-batches and the ranks are reduced once per optimizer step;
with SHARD gradients every micro-batch is reduced at once and only the shard is kept.
"""

from dataclasses import dataclass
from enum import Enum

from lightning_dist.core.errors import ConfigurationError


class Placement(Enum):
    """How a tensor lies over the ranks of an axis."""

    REPLICATE = "replicate"
    PARTIAL = "partial"
    SHARD = "shard"


@dataclass(frozen=True)
class StageRow:
    """Where parameters, gradients (between micro-batches) and optimizer state rest."""

    parameter: Placement
    gradient: Placement
    optimizer: Placement


R, P, S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD

STAGES: dict[int, StageRow] = {
    0: StageRow(parameter=R, gradient=P, optimizer=R),
    1: StageRow(parameter=R, gradient=P, optimizer=S),
    2: StageRow(parameter=R, gradient=S, optimizer=S),
    3: StageRow(parameter=S, gradient=S, optimizer=S),
}


def stage_row(stage: int) -> StageRow:
    """The row of a stage number.

    Raises:
        ConfigurationError: the stage is not 0, 1, 2 or 3.
    """
    if isinstance(stage, bool) or stage not in STAGES:
        raise ConfigurationError(
            f"ZeRO stage {stage!r} does not exist; use 0 (replicate all), 1 (shard optimizer state), "
            "2 (and gradients) or 3 (and parameters)"
        )
    return STAGES[stage]


@dataclass(frozen=True)
class StageBytes:
    """Bytes per rank that a stage keeps, and bytes that a rank sends per optimizer step (closed forms).

    `parameters`, `gradients` and `optimizer` count what rests while micro-batches accumulate. Accounting: the
    optimizer keeps `optimizer_bytes` per parameter (8 for Adam in fp32), and a master copy of `master_bytes` where the
    computing copy is of another dtype or, in stage 3, not kept. Communication is that of ring collectives:
    an all-gather or a reduce-scatter of B bytes sends B * (N - 1) / N from each rank, an all-reduce twice that.
    """

    parameters: int
    gradients: int
    optimizer: int
    communication: int

    @property
    def total(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.parameters + self.gradients + self.optimizer


def ring_bytes(numel: int, itemsize: int, world_size: int) -> int:
    """Bytes sent per rank by one ring all-gather or reduce-scatter over `numel` elements (a multiple of N)."""
    return numel // world_size * (world_size - 1) * itemsize
