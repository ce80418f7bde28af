"""`HybridStrategy`: tensor parallelism inside a node, a pipeline between nodes, ZeRO over what is left.

Each of the three is the strategy of its own name; what they do to a module, `engine.parallelize` puts in order.
"""

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_dist.core.errors import ConfigurationError
from lightning_dist.core.layout import Layout, balanced_layout, explain_sizes
from lightning_dist.engine import memory_line
from lightning_dist.strategies.arguments import insist
from lightning_dist.strategies.pipeline import PipelineParallelStrategy
from lightning_dist.strategies.tensor import TensorParallelStrategy
from lightning_dist.strategies.zero import ZeROStrategy


class HybridStrategy(PipelineParallelStrategy, TensorParallelStrategy, ZeROStrategy):
    """Cuts matrices over `tp` ranks, layers over `pp` ranks, and shards over the replicas that are left (`dp`).

    Ranks that cut matrices together are neighbours, then come replicas, then stages: ``print(strategy.layout)``.

    Args:
        tp: ranks that cut each matrix; they should be of one node.
        pp: ranks over which the layers are divided.
        zero: ZeRO stage over the replicas. With stages 2 and 3 in a pipeline, gradients are sharded once a step is over
            (as with ``accumulate="local"``), and stage 3 keeps a stage's parameters gathered through a step.
        **kwargs: see `TensorParallelStrategy`, `PipelineParallelStrategy` and `ZeROStrategy`.

    Raises:
        ConfigurationError: an argument that does not exist; at setup, sizes that do not fill the world.
    """

    strategy_name = "hybrid"

    def __init__(self, tp: int | None = None, pp: int | None = None, zero: int = 1, **kwargs: Any) -> None:
        if "stage" in kwargs:
            raise ConfigurationError(f"HybridStrategy takes the ZeRO stage as zero={kwargs['stage']!r}")
        insist(zero=zero)
        super().__init__(pp=pp, tp=tp, stage=zero, **kwargs)
        self._said_layout = False

    @override
    def _settings(self) -> str:
        return f"tp={self.tp}, pp={self.pp}, zero={self.stage}"

    @property
    @override
    def layout(self) -> Layout:
        world, node = self.num_nodes * self.num_processes, self.num_processes
        if self.tp is None and self.pp is None:
            layout = balanced_layout(world, node)
        else:
            tp, pp = self.tp or 1, self.pp or 1
            if world % (tp * pp):
                raise ConfigurationError(explain_sizes(tp, pp, world))
            layout = Layout(dp=world // (tp * pp), tp=tp, pp=pp)
        self._warn_of_slow_cuts(layout.tp)
        return layout

    @property
    @override
    def _has_stages(self) -> bool:
        return self.mesh.layout.pp > 1

    @property
    @override
    def divides_parameters(self) -> bool:
        return self.mesh.layout.dp < self.mesh.layout.world_size or self.stage == 3

    @override
    def _line(self) -> str:
        layout = self.mesh.layout
        words = [f"tp{layout.tp}{' with sequence parallelism' if self.sequence_parallel else ''}"] * (layout.tp > 1)
        words += [f"pp{layout.pp} ({self.pipeline.words()})"] if self._has_stages else []
        return " x ".join([*words, memory_line(self.engine)])

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.tp is None and self.pp is None and not self._said_layout:
            self._said_layout = True
            layout = self.mesh.layout
            rank_zero_info(
                f"3d: a balanced layout of {layout.world_size} ranks is tp{layout.tp}_pp{layout.pp}_zero{self.stage} "
                f"with {layout.dp} replicas; this name, or HybridStrategy(tp=, pp=, zero=), asks for it"
            )
