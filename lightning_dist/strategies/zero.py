"""`ZeROStrategy`: ZeRO stages 0 to 3 under Lightning's Trainer; everything but the stage is in `sharded`."""

from dataclasses import replace
from typing import Any

from typing_extensions import override

from lightning_dist.engine import Plan, memory_line
from lightning_dist.strategies.arguments import insist
from lightning_dist.strategies.sharded import ShardedStrategy
from lightning_dist.zero.engine import Accumulate


class ZeROStrategy(ShardedStrategy):
    """Data parallelism that shards optimizer state (stage 1), gradients (2) and parameters (3); stage 0 replicates.

    Args:
        stage: 0, 1, 2 or 3.
        accumulate: what stages 2 and 3 do with gradients of micro-batches before the last of an accumulation:
            "shard" reduces each at once (memory of a shard), "local" sums locally and reduces once (fewer bytes sent).
        prefetch_bytes: how much stage 3 may gather ahead of need; by default as much as the largest unit.
        **kwargs: see `ShardedStrategy`.

    Raises:
        ConfigurationError: an argument that does not exist.
    """

    strategy_name = "zero"

    def __init__(
        self, stage: int = 3, *, accumulate: Accumulate = "shard", prefetch_bytes: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        insist(stage=stage, accumulate=accumulate, prefetch_bytes=prefetch_bytes)
        self.stage = stage
        self.accumulate: Accumulate = accumulate
        self.prefetch_bytes = prefetch_bytes

    @override
    def _settings(self) -> str:
        return f"stage={self.stage}"

    @property
    @override
    def divides_parameters(self) -> bool:
        return self.stage == 3

    @override
    def _plan(self) -> Plan:
        return replace(super()._plan(), zero=self.stage, accumulate=self.accumulate, prefetch_bytes=self.prefetch_bytes)

    @override
    def _line(self) -> str:
        return memory_line(self.engine)
