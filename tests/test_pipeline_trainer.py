"""`Trainer(strategy="pp")`: whatever holds under ZeRO holds here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset

from lightning_dist import PipelineParallelStrategy, ShardedStrategy
from lightning_dist.core.errors import UnsupportedOptimizerError
from tests.harness import rank, ranks, world_size
from tests.lit import trainer_alone, trainer_on_ranks
from tests.pp.lit import Lit, Small, everywhere, fit_both, points
from tests.pp.models import VOCAB
from tests.test_trainer_optimization import REFUSED, Lars, Lion
from tests.tp.lit import assert_same

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "virtual_stages": 2},
    "zb_h1": {"schedule": "zb_h1"},
    "zbv": {"schedule": "zbv"},
    "recompute": {"recompute": "full"},
}


def two_by_two(**options: Any) -> PipelineParallelStrategy:
    return PipelineParallelStrategy(2, **{"num_microbatches": 4, "check_replicas_every": 1} | options)


def share(strategy: PipelineParallelStrategy) -> dict[str, int]:
    replicas = world_size() // (strategy.pp or world_size())
    return {"replicas": replicas, "replica": rank() % replicas}


def small_both(
    make: Callable[[], L.LightningModule] = Small, strategy: PipelineParallelStrategy | None = None, **options: Any
) -> tuple[L.Trainer, Any, L.Trainer, Any]:
    """A small module trained over the ranks and alone, on batches of 8; with validation. Callbacks come as makers."""
    strategy = strategy or two_by_two()
    callbacks = options.pop("callbacks", [])
    module, alone = make(), make()
    ours = trainer_on_ranks(strategy, callbacks=[c() for c in callbacks], **options)
    theirs = trainer_alone(callbacks=[c() for c in callbacks], **options)
    ours.fit(module, points(24, **share(strategy)), points(8, **share(strategy)))
    theirs.fit(alone, points(24), points(8))
    return ours, module, theirs, alone


def assert_same_numbers(ours: L.Trainer, theirs: L.Trainer) -> None:
    assert set(theirs.callback_metrics) <= set(ours.callback_metrics)
    for key, value in theirs.callback_metrics.items():
        torch.testing.assert_close(ours.callback_metrics[key], value, rtol=1e-6, atol=1e-9)


# Parity ---------------------------------------------------------------------------------------------------------


@ranks(2, 4)
@pytest.mark.parametrize("name", ["hand_written", "llama_tied", "gpt2", "bert", "mixtral"])
def test_fit_equals_one_process(name: str) -> None:
    strategy = PipelineParallelStrategy(num_microbatches=4)
    ours, module, theirs, alone = fit_both(lambda: Lit(name), strategy, max_epochs=2)
    assert ours.global_step == theirs.global_step == 4
    assert assert_same(ours, module, alone) > 10
    assert_same_numbers(ours, theirs)


@ranks(4)
@pytest.mark.parametrize("name", ["hand_written", "llama_tied"])
def test_replicas_equal_one_process(name: str) -> None:
    """Data parallel times pipeline; tied words are held by both ends of each replica."""
    strategy = two_by_two()
    ours, module, theirs, alone = fit_both(lambda: Lit(name), strategy, max_epochs=2)
    assert (strategy.mesh.dp.size, strategy.mesh.pp.size) == (2, 2)
    assert ours.global_step == theirs.global_step == 4
    assert assert_same(ours, module, alone) > 10


@ranks(2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_and_accumulation_equal_one_process(schedule: str, accumulate: int) -> None:
    strategy = two_by_two(**SCHEDULES[schedule])
    ours, module, theirs, alone = small_both(Small, strategy, max_epochs=2, accumulate_grad_batches=accumulate)
    assert ours.global_step == theirs.global_step == {1: 6, 2: 4}[accumulate]  # the last batch of an epoch steps alone
    assert_same(ours, module, alone)
    assert_same_numbers(ours, theirs)


@ranks(4)
def test_accumulation_with_replicas_equals_one_process() -> None:
    ours, module, _, alone = small_both(max_epochs=2, accumulate_grad_batches=2)
    assert_same(ours, module, alone)


class ShortAndLong(Dataset[dict[str, Tensor]]):
    """Whole batches, each of another length; the last has fewer samples than there are micro-batches."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCAB, (2 if index == 3 else 8, 4 + index), generator=generator)
        return {"input_ids": ids, "labels": ids}


@ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_lengths_that_change_and_few_samples(schedule: str) -> None:
    module, alone = Lit(), Lit()
    data = DataLoader(ShortAndLong(), batch_size=None, sampler=range(4))
    ours = trainer_on_ranks(two_by_two(**SCHEDULES[schedule]), max_epochs=2, use_distributed_sampler=False)
    theirs = trainer_alone(max_epochs=2)
    ours.fit(module, data)
    theirs.fit(alone, data)
    assert ours.global_step == theirs.global_step == 8
    assert_same(ours, module, alone)


# Optimization ---------------------------------------------------------------------------------------------------


class Norms(Small):
    """Notes the norms before clipping, by all our ways; alone by Lightning's function."""

    def __init__(self) -> None:
        super().__init__(lambda module: SGD(module.parameters(), lr=0.5))
        self.found: dict[str, float] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy, step = self.trainer.strategy, self.trainer.global_step
        if isinstance(strategy, ShardedStrategy):
            norms = strategy.grad_norms()
            assert float(strategy.grad_norm()) == pytest.approx(norms["grad_2.0_norm_total"], rel=1e-12)
            with strategy.gathered(gradients=True):
                assert {k: float(v) for k, v in grad_norm(self, 2.0).items()} == pytest.approx(norms, rel=1e-9)
        else:
            norms = {k: float(v) for k, v in grad_norm(self, 2.0).items()}
        self.found |= {f"{step}/{key}": value for key, value in norms.items()}


@ranks(2, 4)
@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.1), ("value", 0.01)])
def test_clipping_and_norms_equal_one_process(algorithm: str, value: float) -> None:
    options: dict[str, Any] = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm, "max_epochs": 1}
    ours, module, _, alone = small_both(Norms, **options)
    assert len(alone.found) == 3 * 21
    assert max(alone.found.values()) > value, "nothing was clipped"
    assert module.found == pytest.approx(alone.found, rel=1e-8)
    assert all(said == module.found for said in everywhere(ours, module.found))
    assert_same(ours, module, alone)


class Scheduled(Small):
    """Two groups; a schedule by epochs, or by a metric of validation."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim < 2]
        optimizer = AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}], lr=1e-2)
        if self.kind == "step":
            return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


@ranks(2, 4)
@pytest.mark.parametrize("kind", ["step", "plateau"])
def test_schedulers_equal_one_process(kind: str) -> None:
    ours, module, theirs, alone = small_both(lambda: Scheduled(kind), max_epochs=3)
    rates = [[group["lr"] for group in t.optimizers[0].param_groups] for t in (ours, theirs)]
    assert rates[0] == rates[1]
    assert rates[1][0] < 1e-2
    assert_same(ours, module, alone)


class Two(Small):
    """Two optimizers, which Lightning takes by hand only."""

    def configure_optimizers(self) -> Any:
        return SGD(self.blocks.parameters(), 0.1), SGD(self.head.parameters(), 0.1)


@ranks(2)
def test_two_optimizers_are_refused_by_lightning() -> None:
    with pytest.raises(Exception, match="manual"):
        trainer_on_ranks(two_by_two(), max_epochs=1).fit(Two(), points())


class Frozen(Small):
    """As with adapters: most layers are frozen, a part of the others too, and one parameter is never used."""

    def __init__(self, trained: tuple[int, ...]) -> None:
        super().__init__(lambda module: AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2))
        self.requires_grad_(False)
        for index in trained:
            self.blocks[index].requires_grad_(True)  # type: ignore[union-attr]
        self.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))


@ranks(2, 4)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "recompute"])
@pytest.mark.parametrize("trained", [(0, 5), (7,), (1,)], ids=str)
def test_frozen_parameters_equal_one_process(trained: tuple[int, ...], schedule: str) -> None:
    ours, module, _, alone = small_both(lambda: Frozen(trained), two_by_two(**SCHEDULES[schedule]), max_epochs=1)
    assert_same(ours, module, alone)


# Evaluation -----------------------------------------------------------------------------------------------------


@ranks(2, 4)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_evaluation_equals_one_process_on_every_rank(schedule: str) -> None:
    """Of 22 samples the last batch has 6, and predictions are whole and in order wherever one looks."""
    strategy = PipelineParallelStrategy(num_microbatches=4, **SCHEDULES[schedule])
    if world_size() == 4:
        strategy = PipelineParallelStrategy(num_microbatches=4) if schedule == "1f1b" else two_by_two()
    ours, theirs = trainer_on_ranks(strategy), trainer_alone()
    module, alone = Small(), Small()
    for call in ("validate", "test"):
        data = points(24, **share(strategy))
        got, want = (
            getattr(ours, call)(module, data, verbose=False),
            getattr(theirs, call)(alone, points(24), verbose=False),
        )
        assert got == [pytest.approx(want[0], rel=1e-9)]
    if share(strategy)["replicas"] > 1:
        return
    predicted, expected = ours.predict(module, points()), theirs.predict(alone, points())
    assert predicted is not None
    assert [len(part) for part in predicted] == [8, 8, 6]
    for mine, reference in zip(predicted, expected, strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-12)


class Worse(Small):
    """A metric of validation that gets worse from the third epoch on."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch).detach() * 0 + abs(self.trainer.current_epoch - 2.0), sync_dist=True)


@ranks(2, 4)
def test_early_stopping_and_best_checkpoints_agree(tmp_path: Path) -> None:
    kept: list[ModelCheckpoint] = []

    def keep() -> ModelCheckpoint:
        kept.append(ModelCheckpoint(tmp_path / str(len(kept)), "{epoch}", monitor="val", save_top_k=2, save_last=True))
        return kept[-1]

    stop = lambda: EarlyStopping("val", patience=2)  # noqa: E731
    strategy, options = two_by_two(), {"max_epochs": 9, "enable_checkpointing": True}
    ours = trainer_on_ranks(strategy, callbacks=[stop(), keep()], **options)
    ours.fit(Worse(), points(8, **share(strategy)), points(8, **share(strategy)))
    assert ours.current_epoch == 5
    said = everywhere(
        ours, (kept[0].best_model_path, sorted(kept[0].best_k_models), float(kept[0].best_model_score or 0))
    )
    assert all(one == said[0] for one in said)
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert "epoch=2" in said[0][0]


@ranks(2, 4)
def test_fit_again_and_test_after_fit() -> None:
    strategy = two_by_two()
    ours, module, theirs, alone = small_both(Small, strategy, max_epochs=1)
    results = []
    for trainer, m, shared in ((ours, module, share(strategy)), (theirs, alone, {})):
        trainer.fit_loop.max_epochs = 2
        trainer.fit(m, points(24, **shared))
        results.append(trainer.test(m, points(8, **shared), verbose=False))
    assert ours.global_step == theirs.global_step == 6
    assert_same(ours, module, alone)
    assert results[0] == [pytest.approx(results[1][0], rel=1e-9)]


# Optimizers: one that looks at a whole parameter is right where parameters are whole ---------------------------


@ranks(2)
@pytest.mark.parametrize("name", ["lars", "lion"])
def test_optimizers_of_whole_parameters_equal_one_process(name: str) -> None:
    make = {"lars": lambda m: Lars(m.parameters(), lr=1e-2), "lion": lambda m: Lion(m.parameters())}[name]
    ours, module = trainer_on_ranks(PipelineParallelStrategy(num_microbatches=4), max_epochs=1), Small(make)
    theirs, alone = trainer_alone(max_epochs=1), Small(make)
    ours.fit(module, points())
    theirs.fit(alone, points())
    assert assert_same(ours, module, alone) > 10


@ranks(2)
def test_optimizers_that_are_wrong_on_stages_are_refused_by_name() -> None:
    reasons = {"global_norm": "couples", "adafactor": "are away", "muon": "are away", "lbfgs": "LBFGS"}
    for name, reason in reasons.items():
        module = Small(REFUSED[name])
        with pytest.raises(UnsupportedOptimizerError, match=reason) as refusal:
            trainer_on_ranks(PipelineParallelStrategy(), max_steps=1).fit(module, points())
        kind = type(REFUSED[name](Small())).__name__
        assert str(refusal.value).startswith(kind)
        assert "AdamW" in str(refusal.value)
