"""`TensorParallelStrategy`: matrices cut over the devices of a node, the rest of the world data parallel.

The module is cut in place (`lightning_dist.tensor`) before an engine takes its parameters over; from there on
precision, clipping, optimizers, checkpoints and loops are those of every strategy (`sharded`), and what the ranks that
share a replica must agree on is in `replica`.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_dist.core.layout import Layout
from lightning_dist.engine import Plan, size_words, step_bytes
from lightning_dist.strategies.arguments import insist
from lightning_dist.strategies.replica import ReplicaStrategy, number_of_replicas
from lightning_dist.tensor import in_whole


class TensorParallelStrategy(ReplicaStrategy):
    """Cuts matrices over `tp` ranks that share every batch; the other ranks hold copies and average gradients.

    Args:
        tp: ranks per replica; by default all devices of a node.
        sequence_parallel: divide norms, dropout and residuals between the cut layers along the sequence, for less
            activation memory (Korthikanti et al. 2022).
        tp_plan: which modules are cut and how, as name patterns to styles (see `lightning_dist.tensor.plan`); by
            default the module's own attribute `tp_plan`, the model's own plan, or what is known of its module types.
        **kwargs: see `ReplicaStrategy`.

    Raises:
        ConfigurationError: an argument that does not exist; at setup, see `lightning_dist.tensor.cut_module`.
    """

    strategy_name = "tp"

    def __init__(
        self,
        tp: int | None = None,
        *,
        sequence_parallel: bool = False,
        tp_plan: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        insist(tp=tp, sequence_parallel=sequence_parallel, tp_plan=tp_plan)
        self.tp, self.sequence_parallel, self.tp_plan = tp, sequence_parallel, tp_plan

    @override
    def _settings(self) -> str:
        return f"tp={self.tp}"

    @property
    @override
    def layout(self) -> Layout:
        world, tp = self.num_nodes * self.num_processes, self.tp or self.num_processes
        replicas = number_of_replicas("tp", tp, world)
        self._warn_of_slow_cuts(tp)
        return Layout(dp=replicas, tp=tp)

    def _warn_of_slow_cuts(self, tp: int) -> None:
        if tp > self.num_processes and self.num_nodes > 1 and self.global_rank == 0:
            warnings.warn(
                f"tp={tp} is larger than a node ({self.num_processes} devices): every layer's activations cross the "
                "link between nodes, twice forward and twice backward, which is mostly far slower than the one inside. "
                "Use tp within a node and data or pipeline parallelism between nodes",
                stacklevel=3,
            )

    @override
    def _plan(self) -> Plan:
        return replace(super()._plan(), tp_plan=self.tp_plan, sequence_parallel=self.sequence_parallel)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        whole = [] if self.parallel.cuts is None else self.parallel.cuts.whole
        if whole:
            names = ", ".join(whole[:8]) + (" ..." if len(whole) > 8 else "")
            rank_zero_info(f"tp: these linears stay whole on every rank: {names}")

    @override
    def _line(self) -> str:
        engine, layout = self.engine, self.mesh.layout
        cut = sum(s.stop - s.start for s in engine.slots.values() if s.cut is not None)
        held = sum(s.stop - s.start for s in engine.slots.values())
        sequence = " with sequence parallelism" if self.sequence_parallel else ""
        return (
            f"tp{layout.tp}{sequence}, {layout.dp} replicas: per rank {held:,} parameters, of which {cut:,} are its "
            f"parts of cut matrices; gradients of the replicas: {size_words(step_bytes(engine))} per step"
        )

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predictions leave the step, so they leave it whole."""
        return pytree.tree_map(in_whole, super().predict_step(*args, **kwargs))

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(in_whole(tensor), group, sync_grads)
