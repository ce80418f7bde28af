"""Lightning's averaging callbacks under the stages: the weights that one process would have averaged."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from tests.harness import rank, ranks
from tests.lit import Regressor, assert_same_weights, loader, trainer_alone, trainer_on_ranks, weights

STAGES = (0, 1, 2, 3)
pytestmark = pytest.mark.filterwarnings("ignore:.*keeps a whole average")


class Late(WeightAveraging):
    """Averages every second step, from the second epoch on."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 3 and step_idx % 2 == 0


CALLBACKS: dict[str, Any] = {
    "mean": WeightAveraging,
    "late": Late,
    "ema": lambda: EMAWeightAveraging(decay=0.7),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=2, annealing_epochs=2),
}
EPOCHS: dict[str, Any] = {"max_epochs": 4, "limit_train_batches": 3}


def scheduled(module: Any) -> Any:
    """Averaging takes the place of this scheduler, or leaves it."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch)]


class Watched(Regressor):
    """Keeps what its validations saw."""

    def __init__(self) -> None:
        super().__init__(scheduled)
        self.losses: list[float] = []

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        loss = self.trainer.strategy.reduce(self.loss(batch))
        self.losses.append(float(loss))


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", CALLBACKS)
def test_averages_equal_one_process(stage: int, kind: str, tmp_path: Path) -> None:
    """Validations (which see the average), the weights after fit, and a checkpoint's contents."""
    ours, reference = Watched(), Watched()
    if rank() == 1:
        with torch.no_grad():
            ours.first.weight.add_(1.0)  # rank 0's initial values count, for the average too
    trainer = trainer_on_ranks(stage, callbacks=[CALLBACKS[kind]()], **EPOCHS)
    trainer.fit(ours, loader(), loader(seed=1))
    alone = trainer_alone(callbacks=[CALLBACKS[kind]()], **EPOCHS)
    alone.fit(reference, loader(alone=True), loader(seed=1, alone=True))
    assert ours.losses == pytest.approx(reference.losses, rel=1e-9)
    assert_same_weights(weights(trainer, ours), weights(alone, reference), rel=1e-9)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    if rank() == 0:
        alone.save_checkpoint(tmp_path / "alone.ckpt")
        got, want = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("ours", "alone"))
        assert got.keys() == want.keys()
        for key in {"state_dict", "current_model_state"} & want.keys():
            assert_same_weights(got[key], want[key], rel=1e-9)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", CALLBACKS)
def test_averages_survive_resuming(stage: int, kind: str, tmp_path: Path) -> None:
    """From a checkpoint in the middle of averaging, in one process and on the ranks, with the average's state."""
    ours, reference = Watched(), Watched()
    for where, module in (("ours", ours), ("alone", reference)):
        if where == "alone" and rank():
            continue
        folder = tmp_path / where
        keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        for path in (None, folder / "epoch=2.ckpt"):
            make = functools.partial(trainer_on_ranks, stage) if where == "ours" else trainer_alone
            callbacks = [CALLBACKS[kind](), *([keep] if path is None else [])]
            trainer = make(callbacks=callbacks, enable_checkpointing=path is None, **EPOCHS)
            alone = where == "alone"
            start = Watched() if path is None else module
            trainer.fit(start, loader(alone=alone), loader(seed=1, alone=alone), ckpt_path=path)
        if where == "ours":
            got = weights(trainer, ours)
    if rank() == 0:
        assert_same_weights(got, {n: p.detach() for n, p in reference.named_parameters()}, rel=1e-9)
        assert ours.losses == pytest.approx(reference.losses, rel=1e-9)
        assert ours.losses


class Crawls(Watched):
    """Float32, updates too small for bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.make_optimizer = lambda m: torch.optim.SGD(m.parameters(), lr=1e-5)
        self.float()

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0].float()).float(), batch[1].float())


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ("mean", "swa"))
def test_masters_are_averaged_under_mixed_precision(stage: int, kind: str) -> None:
    """An average of rounded copies would not move at all."""
    start = {n: p.detach().clone() for n, p in Crawls().named_parameters()}
    ours = Crawls()
    trainer = trainer_on_ranks(stage, callbacks=[CALLBACKS[kind]()], precision="bf16-mixed", **EPOCHS)
    trainer.fit(ours, loader(), loader(seed=1))
    reference = Crawls()
    alone = trainer_alone(callbacks=[CALLBACKS[kind]()], precision="bf16-mixed", **EPOCHS)
    alone.fit(reference, loader(alone=True), loader(seed=1, alone=True))
    got, want = weights(trainer, ours), weights(alone, reference)
    moved = (want["last.weight"] - start["last.weight"]).norm()
    assert moved > 0
    assert (got["last.weight"] - want["last.weight"]).norm() < 0.05 * moved


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ("mean", "swa"))
def test_averaging_starts_again_on_a_sharded_module(stage: int, kind: str) -> None:
    """A second fit, with the same trainer or another one, copies the module while it is sharded."""
    module, reference = Watched(), Watched()
    trainer = trainer_on_ranks(stage, max_epochs=1, limit_train_batches=3)
    trainer.fit(module, loader())
    alone = trainer_alone(max_epochs=1, limit_train_batches=3)
    alone.fit(reference, loader(alone=True))
    for _ in range(2):
        trainer = trainer_on_ranks(stage, callbacks=[CALLBACKS[kind]()], **EPOCHS)
        trainer.fit(module, loader(), loader(seed=1))
        trainer.validate(module, loader(seed=1), verbose=False)
        alone = trainer_alone(callbacks=[CALLBACKS[kind]()], **EPOCHS)
        alone.fit(reference, loader(alone=True), loader(seed=1, alone=True))
        alone.validate(reference, loader(seed=1, alone=True), verbose=False)
    assert module.losses == pytest.approx(reference.losses, rel=1e-9)
    assert_same_weights(weights(trainer, module), weights(alone, reference), rel=1e-9)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_statistics_are_made_anew_for_the_average(stage: int) -> None:
    """An additional epoch without backward fills batch norm; all ranks end with the same weights and statistics."""

    class Normed(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8).double()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    module = Normed()
    trainer = trainer_on_ranks(stage, callbacks=[CALLBACKS["swa"]()], **EPOCHS)
    trainer.fit(module, loader(), loader(seed=1))
    assert int(module.norm.num_batches_tracked or 0) == 3
    trainer.validate(module, loader(seed=1), verbose=False)
    found = (module.norm.running_mean, [p.tolist() for p in weights(trainer, module).values()], module.losses[-3:])
    everyone = trainer.strategy.mesh.rollcall.exchange([found[0].tolist(), *found[1:]])  # type: ignore[union-attr, attr-defined]
    assert everyone[0] == everyone[1]
