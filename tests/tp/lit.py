"""LightningModules under tensor parallelism, and the one process that they must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_dist import TensorParallelStrategy
from tests.harness import rank, world_size
from tests.lit import trainer_alone, trainer_on_ranks
from tests.tp.models import CASES, TOKENS, VOCAB, AllInFloat64

EXACT = 1e-9


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens; every sample the same whoever asks."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCAB, (samples, TOKENS), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Lit(L.LightningModule):
    """A model of the table as a user would wrap it."""

    def __init__(self, name: str = "hand_written", make_optimizer: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        case = CASES[name]
        self.case, self.model = case, case.build()
        self.tp_plan = None if case.plan is None else {f"model.{k}": v for k, v in case.plan.items()}
        self.make_optimizer = make_optimizer or (lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2))
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        with AllInFloat64():
            return self.case.loss(self.model, batch)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, sync_dist=True)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        with AllInFloat64():
            out = self.model(batch["input_ids"])
        return (out if isinstance(out, Tensor) else out.logits).argmax(-1)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


def texts(samples: int = 16, batch: int = 4, *, replicas: int = 1, replica: int = 0) -> DataLoader[Any]:
    """A replica's share in a fixed order (Lightning's own sampler shuffles)."""
    sampler = DistributedSampler(Texts(samples), replicas, replica, shuffle=False)
    return DataLoader(Texts(samples), batch_size=batch // replicas, sampler=sampler)


def fit_both(
    make: Callable[[], L.LightningModule],
    strategy: TensorParallelStrategy | None = None,
    *,
    samples: int = 16,
    batch: int = 4,
    **options: Any,
) -> tuple[L.Trainer, L.LightningModule, L.Trainer, L.LightningModule]:
    """The module trained over the ranks, and by one process on the same global batches."""
    strategy = strategy or TensorParallelStrategy()
    module, alone = make(), make()
    theirs = trainer_alone(**copy.deepcopy(options))
    ours = trainer_on_ranks(strategy, **options)
    replicas = world_size() // (strategy.tp or world_size())
    share = {"replicas": replicas, "replica": rank() // (world_size() // replicas)}
    ours.fit(module, texts(samples, batch, **share), texts(8, **share))
    theirs.fit(alone, texts(samples, batch), texts(8))
    return ours, module, theirs, alone


def whole_weights(trainer: L.Trainer, module: nn.Module) -> dict[str, Tensor]:
    """Whole values of all parameters, on every rank."""
    with trainer.strategy.gathered(module):  # type: ignore[attr-defined]
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_same(trainer: L.Trainer, module: nn.Module, alone: nn.Module) -> int:
    """All whole weights equal those of one process; returns their number."""
    ours, theirs = whole_weights(trainer, module), dict(alone.named_parameters())
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert value.shape == theirs[name].shape, name
        worst = float((value - theirs[name].detach()).abs().max())
        assert worst <= EXACT * max(1.0, float(theirs[name].detach().abs().max())), (name, worst)
    return len(ours)
