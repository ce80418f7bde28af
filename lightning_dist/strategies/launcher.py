"""Processes by multiprocessing, which bring the trained weights back to the parent.

Lightning's launcher asks the module for its state dict after training. Sharded weights are collected on rank 0
for it, tensor by tensor.
"""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from typing_extensions import override

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput


class ShardedMultiProcessingLauncher(_MultiProcessingLauncher):
    """See the module docstring."""

    @override
    def _collect_rank_zero_results(self, trainer: "pl.Trainer", results: Any) -> "_WorkerOutput | None":
        module = trainer.lightning_module
        state = trainer.strategy.lightning_module_state_dict()
        module.__dict__["state_dict"] = lambda *args, **kwargs: state
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.__dict__["state_dict"]
