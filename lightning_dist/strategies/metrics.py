"""torchmetrics where several ranks compute one replica: it counts once.

A metric puts its state together over all ranks of the world. Those of one replica have seen the same samples, so sums
and lists would hold each of them several times: metrics are made to ask one rank of every replica.
"""

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_dist.comm import Mesh


class _OverReplicas:
    """What a metric gathers its states with. A copy of the metric, or a pickled one, has torchmetrics' own again."""

    def __init__(self, mesh: Mesh) -> None:
        self.axis = mesh.dp

    def __call__(self, state: Tensor, group: Any | None = None) -> list[Tensor]:
        """The states of all replicas, in their order."""
        if self.axis.size == 1:
            return [state]
        gathered: list[Tensor] = gather_all_tensors(state, self.axis.groups["gather"])
        return gathered

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def count_replicas_once(module: nn.Module, mesh: Mesh) -> None:
    """Let the metrics of `module` gather over replicas, where the user has not said how they gather."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None and metric.process_group is None:
            metric.dist_sync_fn = _OverReplicas(mesh)


def count_ranks(module: nn.Module) -> None:
    """Undo `count_replicas_once`."""
    for metric in module.modules():
        if isinstance(metric, Metric) and isinstance(metric.dist_sync_fn, _OverReplicas):
            metric.dist_sync_fn = None
