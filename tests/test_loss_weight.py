"""`loss_weight`: micro-batches, accumulated batches and replicas together equal one big batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dist import (
    HybridStrategy,
    PipelineParallelStrategy,
    ShardedStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from tests.harness import rank, ranks, world_size
from tests.lit import trainer_alone, trainer_on_ranks
from tests.pp.lit import Lit, Texts
from tests.tp.lit import assert_same
from tests.tp.models import HandWrittenGPT

SAMPLES, STEPS = 16, 2


class Uneven(Texts):
    """Texts of which very different parts are learned; some hold nothing to learn."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "labels": torch.where(torch.arange(len(ids)) > index % 6, ids, -100)}


class Weighed(Lit):
    def loss_weight(self, batch: Any) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()


PLAN = {f"model.{name}": style for name, style in HandWrittenGPT.PLAN.items()}
STRATEGIES: dict[str, tuple[int, Callable[[], ShardedStrategy]]] = {
    **{f"zero{stage}": (1, lambda stage=stage: ZeROStrategy(stage)) for stage in (0, 1, 3)},  # type: ignore[misc]
    "tp2": (
        2,
        lambda: TensorParallelStrategy(
            2, tp_plan={f"model.{name}": style for name, style in HandWrittenGPT.PLAN.items()}
        ),
    ),
    "pp2": (2, lambda: PipelineParallelStrategy(2, num_microbatches=3)),
    "pp2_zero2": (2, lambda: HybridStrategy(pp=2, zero=2, num_microbatches=3)),
    "pp4": (4, lambda: PipelineParallelStrategy(4, num_microbatches=3)),
}
"""name -> (ranks of a replica, strategy)"""


@ranks(4)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_tokens_count_alike_wherever_they_are(name: str, accumulate: int) -> None:
    size, make = STRATEGIES[name]
    strategy, replicas = make(), world_size() // size
    module, alone = Weighed("hand_written"), Lit("hand_written")
    per_step = SAMPLES // STEPS
    if per_step < accumulate * replicas:
        return
    per_batch = per_step // (accumulate * replicas)
    order = torch.arange(SAMPLES).view(STEPS, accumulate, replicas, per_batch)
    mine = order[:, :, strategy_coordinate(strategy, replicas)].reshape(-1).tolist()
    data = Uneven(SAMPLES)
    trainer = trainer_on_ranks(
        strategy, max_epochs=1, accumulate_grad_batches=accumulate, use_distributed_sampler=False
    )
    trainer.fit(module, DataLoader(data, batch_size=per_batch, sampler=mine))
    whole: L.Trainer = trainer_alone(max_epochs=1)
    whole.fit(alone, DataLoader(data, batch_size=per_step))
    assert trainer.global_step == whole.global_step == STEPS
    assert assert_same(trainer, module, alone) > 10


def strategy_coordinate(strategy: ShardedStrategy, replicas: int) -> int:
    """Which replica this rank is of: tp peers are neighbours, stages are far apart."""
    return rank() // 2 if isinstance(strategy, TensorParallelStrategy) and strategy.tp == 2 else rank() % replicas


@ranks(2)
def test_without_weights_it_is_the_mean_of_means() -> None:
    """And that differs, or the test above would show nothing."""
    module, alone = Lit("hand_written"), Lit("hand_written")
    strategy = PipelineParallelStrategy(num_microbatches=2)
    trainer = trainer_on_ranks(strategy, max_epochs=1, use_distributed_sampler=False)
    data = Uneven(SAMPLES)
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=False))
    trainer_alone(max_epochs=1).fit(alone, DataLoader(data, batch_size=8))
    with pytest.raises(AssertionError):
        assert_same(trainer, module, alone)
