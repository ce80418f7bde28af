"""Checkpoints of a module that an engine holds in parts: ordinary Lightning files of whole tensors.

What is written is what one process would have written, so any strategy, and none, can read it. Tensors are put together
one by one on rank 0; on loading every rank reads the file and keeps its own parts.
"""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.checkpoint import full_optimizer_state, full_state_dict, local_optimizer_state
from lightning_dist.strategies.base import DistributedStrategy
from lightning_dist.zero import ZeroEngine


class CheckpointingStrategy(DistributedStrategy):
    """What Lightning asks a strategy for when it saves and loads; see the module docstring."""

    @property
    @abstractmethod
    def engine(self) -> ZeroEngine:
        """The engine that holds the module's parameters."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def full_state_dict(self) -> dict[str, Any]:
        """The module's state dict with whole tensors on rank 0's CPU (meta tensors elsewhere). All ranks."""
        return full_state_dict(self.engine)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.full_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return full_optimizer_state(self.engine, unwrapped(optimizer))

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """A local file is mapped, not read: each rank touches only the pages of its own shards."""
        path = Path(str(checkpoint_path))
        if isinstance(self.checkpoint_io, TorchCheckpointIO) and path.is_file():
            checkpoint: dict[str, Any] = torch.load(
                path, map_location="cpu", mmap=_is_zip(checkpoint_path), weights_only=weights_only
            )
            return checkpoint
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        with self.engine.loading():
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(local_optimizer_state(self.engine, optimizer, saved))


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside Lightning's wrapper."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _is_zip(path: _PATH) -> bool:
    """Files of torch's old format cannot be mapped."""
    with get_filesystem(path).open(str(path), "rb") as file:
        return bool(file.read(2) == b"PK")
