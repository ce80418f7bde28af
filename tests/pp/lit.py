"""LightningModules under a pipeline, and the one process that they must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.aggregation import CatMetric

from lightning_dist import PipelineParallelStrategy
from tests.harness import rank, world_size
from tests.lit import trainer_alone, trainer_on_ranks
from tests.pp.models import CASES, VOCAB
from tests.tp.models import AllInFloat64


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens; every sample the same whoever asks."""

    def __init__(self, samples: int) -> None:
        self.ids = torch.randint(0, VOCAB, (samples, 6), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Lit(L.LightningModule):
    """A model of the table as a user would wrap it, with what users do in their steps."""

    def __init__(self, name: str = "hand_written", make_optimizer: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.case = CASES[name]
        self.model = self.case.build()
        self.make_optimizer = make_optimizer or (lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2))
        self.mean, self.all = MeanMetric().double(), CatMetric().double()
        self.steps, self.kept, self.epoch_means = 0, [], []  # type: ignore[var-annotated]

    def loss(self, batch: Any) -> Tensor:
        with AllInFloat64():
            return self.case.loss(self.model, batch)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, sync_dist=True, prog_bar=True)
        return {"loss": loss, "first": batch["input_ids"][:, 0]}

    def validation_step(self, batch: Any, index: int) -> None:
        loss = self.loss(batch)
        self.mean.update(loss.detach(), weight=len(batch["input_ids"]))
        self.all.update(loss.detach())
        self.kept.append(loss.detach())
        self.log_dict({"val": loss, "val_twice": 2 * loss}, sync_dist=True)
        self.log("val_mean", self.mean)

    def on_validation_epoch_end(self) -> None:
        self.epoch_means.append(torch.stack(self.kept).mean())
        self.kept.clear()

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        with AllInFloat64():
            out = self.model(batch["input_ids"])
        return (out if isinstance(out, Tensor) else out.logits).argmax(-1)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


def texts(samples: int = 16, batch: int = 8, *, replicas: int = 1, replica: int = 0) -> DataLoader[Any]:
    """A replica's share in a fixed order (Lightning's own sampler shuffles)."""
    sampler = DistributedSampler(Texts(samples), replicas, replica, shuffle=False)
    return DataLoader(Texts(samples), batch_size=batch // replicas, sampler=sampler)


def fit_both(
    make: Callable[[], L.LightningModule],
    strategy: PipelineParallelStrategy | None = None,
    *,
    samples: int = 16,
    **options: Any,
) -> tuple[L.Trainer, Any, L.Trainer, Any]:
    """The module trained over the ranks, and by one process on the same global batches."""
    strategy = strategy or PipelineParallelStrategy()
    module, alone = make(), make()
    theirs = trainer_alone(**copy.deepcopy(options))
    ours = trainer_on_ranks(strategy, **options)
    pp = strategy.pp or world_size()
    replicas = world_size() // pp
    share = {"replicas": replicas, "replica": rank() % replicas}
    ours.fit(module, texts(samples, **share), texts(8, **share))
    theirs.fit(alone, texts(samples), texts(8))
    return ours, module, theirs, alone


class Small(L.LightningModule):
    """Eight small layers between two linears, three targets; quick."""

    def __init__(self, make_optimizer: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8)])
        self.head = nn.Linear(6, 3)
        self.make_optimizer = make_optimizer or (lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.head(x)
        return y

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        self.last = out.detach()
        return nn.functional.mse_loss(out, batch[1])

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> Any:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> Any:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


def points(samples: int = 22, batch: int = 8, *, replicas: int = 1, replica: int = 0) -> DataLoader[Any]:
    """A regression in float64, in a fixed order; of 22 samples the last batch has 6."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return in_order(TensorDataset(inputs, inputs[:, :3].sin()), batch, replicas=replicas, replica=replica)


def in_order(data: Any, batch: int, *, replicas: int = 1, replica: int = 0) -> DataLoader[Any]:
    """A replica's share in a fixed order."""
    sampler = DistributedSampler(data, replicas, replica, shuffle=False)
    return DataLoader(data, batch_size=batch // replicas, sampler=sampler)


def everywhere(trainer: L.Trainer, thing: object) -> list[Any]:
    """What every rank says."""
    said: list[Any] = trainer.strategy.mesh.rollcall.exchange(thing)  # type: ignore[attr-defined]
    return said
