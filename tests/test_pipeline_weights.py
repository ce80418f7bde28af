"""`loss_weight`: micro-batches, accumulated batches and replicas together equal one big batch."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dist import PipelineParallelStrategy
from tests.harness import rank, ranks, world_size
from tests.lit import trainer_alone, trainer_on_ranks
from tests.pp.lit import Lit, Texts
from tests.tp.lit import assert_same

SAMPLES, STEPS = 16, 2


class Uneven(Texts):
    """Texts of which very different parts are learned; some hold nothing to learn."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "labels": torch.where(torch.arange(len(ids)) > index % 6, ids, -100)}


class Weighed(Lit):
    def loss_weight(self, batch: Any) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()


@ranks(2, 4)
@pytest.mark.parametrize(("pp", "accumulate"), [(2, 1), (2, 2), (2, 4), (4, 2)])
def test_tokens_count_alike_wherever_they_are(pp: int, accumulate: int) -> None:
    if pp > world_size():
        return
    replicas = world_size() // pp
    module, alone = Weighed("hand_written"), Lit("hand_written")
    per_step = SAMPLES // STEPS
    per_batch = per_step // (accumulate * replicas)
    order = torch.arange(SAMPLES).view(STEPS, accumulate, replicas, per_batch)
    mine = order[:, :, rank() % replicas].reshape(-1).tolist()
    data = Uneven(SAMPLES)
    trainer = trainer_on_ranks(
        PipelineParallelStrategy(pp=pp, num_microbatches=3),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=per_batch, sampler=mine))
    whole: L.Trainer = trainer_alone(max_epochs=1)
    whole.fit(alone, DataLoader(data, batch_size=per_step))
    assert trainer.global_step == whole.global_step == STEPS
    assert assert_same(trainer, module, alone) > 10


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
