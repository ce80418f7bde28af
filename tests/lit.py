"""Small LightningModules and Trainers for tests: one process as the reference, the ranks of a pool beside it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import ClusterEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_dist import ShardedStrategy, ZeROStrategy
from tests.harness import rank, world_size

for _name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities"):
    logging.getLogger(_name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class PoolEnvironment(ClusterEnvironment):
    """The Trainer inside a pool worker: processes and process group exist already."""

    creates_processes_externally = True
    main_address = "localhost"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return world_size()

    def set_world_size(self, size: int) -> None:
        assert size == world_size()

    def global_rank(self) -> int:
        return rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return rank()

    def node_rank(self) -> int:
        return 0


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}


def trainer_on_ranks(strategy: ShardedStrategy | int, **options: Any) -> L.Trainer:
    """A Trainer over all ranks of the pool."""
    if isinstance(strategy, int):
        strategy = ZeROStrategy(strategy)
    plugins = [PoolEnvironment(), *options.pop("plugins", [])]
    return L.Trainer(strategy=strategy, devices=world_size(), plugins=plugins, **{**QUIET, **options})


def trainer_alone(**options: Any) -> L.Trainer:
    """A Trainer of one process: what the ranks together must equal."""
    return L.Trainer(devices=1, strategy="auto", **{**QUIET, **options})


@contextmanager
def told() -> Iterator[list[str]]:
    """Lines that Lightning's rank-zero helper says in the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.ERROR)


def loader(samples: int = 48, per_rank: int = 2, *, alone: bool = False, seed: int = 0) -> DataLoader[Any]:
    """Regression data in float64. Alone, a batch is the union of what the ranks get, in the same order."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
    targets = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    data = TensorDataset(inputs, targets)
    if alone:
        return DataLoader(data, batch_size=per_rank * world_size())
    sampler = DistributedSampler(data, world_size(), rank(), shuffle=False)
    return DataLoader(data, batch_size=per_rank, sampler=sampler)


class Block(nn.Module):
    """A residual layer, so that a stack of them is found as units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y


class Regressor(L.LightningModule):
    """Three blocks between two linears; everything a user writes for one device."""

    def __init__(self, optimizer: Callable[[Any], Any] | None = None, *, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.last = nn.Linear(width, 3)
        self.make_optimizer = optimizer or (lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2))
        self.seen: list[str] = []
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x)
        return y

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        y: Tensor = self(batch[0])
        return y

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


def weights(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Tensor]:
    """Whole parameters by name, on every rank."""
    if isinstance(trainer.strategy, ShardedStrategy):
        with trainer.strategy.gathered(module):
            return {name: p.detach().clone() for name, p in module.named_parameters()}
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_same_weights(got: dict[str, Tensor], want: dict[str, Tensor], *, rel: float = 1e-10) -> None:
    """Compare whole weights by name."""
    assert list(got) == list(want)
    for name, value in want.items():
        error = (got[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)
        assert error <= rel, f"{name} differs by {float(error):.2e}"


def fit_both(
    stage: int | ShardedStrategy, make: Callable[[], L.LightningModule], *, val: bool = False, **options: Any
) -> tuple[L.Trainer, L.LightningModule, L.Trainer, L.LightningModule]:
    """Fit the module on the ranks and alone, on the same global batches."""
    ours, reference = make(), make()
    trainer, alone = trainer_on_ranks(stage, **options), trainer_alone(**options)
    trainer.fit(ours, loader(), loader(seed=1) if val else None)
    alone.fit(reference, loader(alone=True), loader(alone=True, seed=1) if val else None)
    return trainer, ours, alone, reference
