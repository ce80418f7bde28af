"""Under Lightning's Trainer: orders of calls, checkpoints, what user code sees, data that ends unevenly, logging."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist import ZeROStrategy
from lightning_dist.core.errors import (
    NonFiniteLossError,
    PeerLostError,
    RankMismatchError,
    ReleasedParameterError,
    ShardedGradientError,
)
from tests.harness import rank, ranks, world_size
from tests.lit import (
    Regressor,
    assert_same_weights,
    fit_both,
    loader,
    told,
    trainer_alone,
    trainer_on_ranks,
    weights,
)

STAGES = (0, 1, 2, 3)
CALLS = ("fit", "validate", "test", "predict", "save")


def everywhere(trainer: L.Trainer, value: Any) -> list[Any]:
    """What each rank has."""
    strategy = trainer.strategy
    assert isinstance(strategy, ZeROStrategy)
    return strategy.mesh.rollcall.exchange(value)


# Orders of calls ------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("length", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_calls_in_every_order(stage: int, length: int, tmp_path: Path) -> None:
    """All ordered pairs (and triples) of fit, validate, test, predict and save: none disturbs another."""
    swept = 0
    for order in itertools.permutations(CALLS, length):
        if order[0] == "save":
            continue  # nothing to save before the first call, as with any strategy
        module = Regressor()
        trainer = trainer_on_ranks(stage, max_epochs=1, limit_train_batches=2, limit_val_batches=2)
        losses: list[float] = []
        for call in order:
            if call == "fit":
                trainer.fit(module, loader())
            elif call == "save":
                trainer.save_checkpoint(tmp_path / "order.ckpt")
            elif call == "predict":
                assert len(trainer.predict(module, loader()) or []) > 0
            else:
                losses.append(
                    getattr(trainer, call)(module, loader(), verbose=False)[0][
                        f"{call[:4].rstrip('i')}_loss" if call == "test" else "val_loss"
                    ]
                )
        assert all(torch.isfinite(torch.tensor(loss)) for loss in losses)
        swept += 1
    assert swept == {2: 16, 3: 48}[length]


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_validation_agrees_before_and_after_saving_and_in_one_process(stage: int, tmp_path: Path) -> None:
    module = Regressor()
    trainer = trainer_on_ranks(stage, max_epochs=1)
    trainer.fit(module, loader())
    before = trainer.validate(module, loader(seed=1), verbose=False)[0]["val_loss"]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    after = trainer.validate(module, loader(seed=1), verbose=False)[0]["val_loss"]
    plain = Regressor()
    alone = trainer_alone().validate(plain, loader(seed=1, alone=True), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    loaded = trainer_on_ranks(stage).test(Regressor(), loader(seed=1), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert before == after
    assert alone[0]["val_loss"] == pytest.approx(before, rel=1e-12)
    assert loaded[0]["test_loss"] == pytest.approx(before, rel=1e-12)


@ranks(2)
def test_evaluation_needs_no_optimizer_and_takes_two_loaders() -> None:
    class Frozen(Regressor):
        def configure_optimizers(self) -> Any:
            raise AssertionError("not needed")

    out = trainer_on_ranks(3).validate(Frozen(), [loader(), loader(seed=2)], verbose=False)
    assert len(out) == 2


# Checkpoints ----------------------------------------------------------------------------------------------------


EPOCH: dict[str, Any] = {"limit_train_batches": 3}
"""Checkpoints are taken between epochs: Lightning does not put a plain loader back to the middle of one."""


def saved_by(maker: str, path: Path) -> None:
    """An epoch, then a checkpoint: by a stage of ours, or by one process (what DDP would write)."""
    if maker == "alone":
        trainer = trainer_alone(max_epochs=1, **EPOCH)
        trainer.fit(Regressor(), loader(alone=True))
    else:
        trainer = trainer_on_ranks(int(maker), max_epochs=1, **EPOCH)
        trainer.fit(Regressor(), loader())
    if maker != "alone" or rank() == 0:
        trainer.save_checkpoint(path)


@ranks(2, 3, 4)
@pytest.mark.parametrize("maker", ("alone", "0", "1", "2", "3"))
def test_any_stage_resumes_any_checkpoint(maker: str, tmp_path: Path) -> None:
    """All pairs of makers and readers continue as the uninterrupted run, with the optimizer's moments."""
    path = tmp_path / "half.ckpt"
    saved_by(maker, path)
    trainer_on_ranks(0).validate(Regressor(), loader(), verbose=False)  # all ranks see the file after this
    straight = Regressor()
    whole = trainer_alone(max_epochs=2, **EPOCH)
    whole.fit(straight, loader(alone=True))
    for stage in STAGES:
        module = Regressor()
        trainer = trainer_on_ranks(stage, max_epochs=2, **EPOCH)
        trainer.fit(module, loader(), ckpt_path=path)
        assert trainer.global_step == 6
        assert_same_weights(weights(trainer, module), weights(whole, straight))
    if rank() == 0:
        module = Regressor()
        alone = trainer_alone(max_epochs=2, **EPOCH)
        alone.fit(module, loader(alone=True), ckpt_path=path)
        assert_same_weights(weights(alone, module), weights(whole, straight))


@pytest.mark.parametrize("stage", (1, 3))
def test_resume_on_another_number_of_ranks(stage: int, tmp_path: Path, rank_pools: Any) -> None:
    path = str(tmp_path / "four.ckpt")
    wrote = rank_pools.run(write_on_ranks, 4, timeout=300, arguments={"stage": stage, "path": path})
    for world in (2, 3):
        read = rank_pools.run(read_on_ranks, world, timeout=300, arguments={"stage": stage, "path": path})
        for values in read:
            assert_same_weights(values, wrote[0], rel=0.0)


def write_on_ranks(stage: int, path: str) -> Any:
    trainer, module = trainer_on_ranks(stage, max_steps=3), Regressor()
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    return weights_and_moments(trainer, module)


def read_on_ranks(stage: int, path: str) -> Any:
    trainer, module = trainer_on_ranks(stage, max_steps=3), Regressor()
    trainer.fit(module, loader(), ckpt_path=path)  # has made its three steps: only loads
    return weights_and_moments(trainer, module)


def weights_and_moments(trainer: L.Trainer, module: L.LightningModule) -> dict[str, torch.Tensor]:
    """Whole weights and both Adam moments, on every rank."""
    found = weights(trainer, module)
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])
    moments = {f"{n}.{k}": v for n, s in state["state"].items() for k, v in s.items()}
    shared = trainer.strategy.broadcast({k: v for k, v in moments.items() if rank() == 0})
    assert len(shared) == 3 * len(found)
    return found | shared


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_checkpoint_is_what_one_process_writes(stage: int, tmp_path: Path) -> None:
    trainer, ours, alone, reference = fit_both(stage, Regressor, max_steps=3)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    if rank():
        return
    alone.save_checkpoint(tmp_path / "alone.ckpt")
    got = torch.load(tmp_path / "ours.ckpt", weights_only=False)
    want = torch.load(tmp_path / "alone.ckpt", weights_only=False)
    assert got.keys() == want.keys()
    assert_same_weights(got["state_dict"], want["state_dict"])
    mine, theirs = got["optimizer_states"][0], want["optimizer_states"][0]
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert_same_weights(mine["state"][number], state, rel=1e-9)
    plain = Regressor()
    plain.load_state_dict(got["state_dict"], strict=True)


@ranks(2)
@pytest.mark.parametrize("stage", (1, 3))
def test_hooks_may_edit_a_checkpoint(stage: int, tmp_path: Path) -> None:
    class Edits(Regressor):
        def __init__(self, size: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = 5
            checkpoint["state_dict"].pop("last.bias")

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["mine"] == 5
            checkpoint["state_dict"]["last.bias"] = torch.full((3,), 9.0, dtype=torch.float64)

    trainer = trainer_on_ranks(stage, max_steps=1)
    trainer.fit(Edits(), loader())
    trainer.save_checkpoint(tmp_path / "edited.ckpt")
    saved = torch.load(tmp_path / "edited.ckpt", weights_only=False)
    assert saved["mine"] == 5
    assert saved["hyper_parameters"] == {"size": 8}
    assert "last.bias" not in saved["state_dict"]
    again = Edits()
    reader = trainer_on_ranks(stage)
    reader.validate(again, loader(), ckpt_path=tmp_path / "edited.ckpt", verbose=False)
    assert torch.equal(weights(reader, again)["last.bias"], torch.full((3,), 9.0, dtype=torch.float64))


@ranks(2)
@pytest.mark.parametrize("stage", (1, 3))
def test_model_checkpoint_keeps_best_and_last(stage: int, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2, save_last=True)
    trainer = trainer_on_ranks(stage, max_epochs=4, callbacks=[keep], enable_checkpointing=True)
    trainer.fit(Regressor(), loader(), loader(seed=1))
    assert len(list(tmp_path.glob("epoch*.ckpt"))) == 2
    assert (tmp_path / "last.ckpt").exists()
    assert len(set(everywhere(trainer, (keep.best_model_path, float(keep.best_model_score or 0))))) == 1
    trainer.test(ckpt_path="best", dataloaders=loader(), verbose=False)


@ranks(2)
@pytest.mark.parametrize("stage", (1, 3))
def test_strict_loading_names_what_is_missing(stage: int, tmp_path: Path) -> None:
    trainer = trainer_on_ranks(stage, max_steps=1)
    trainer.fit(Regressor(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    class Other(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(3, 3).double()

    with pytest.raises(RuntimeError, match=r"more\.weight"):
        trainer_on_ranks(stage).validate(Other(), loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)


# What user code sees --------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_the_model_does_not_look_empty(stage: int) -> None:
    counts: dict[str, tuple[int, int]] = {}
    shapes = {name: tuple(p.shape) for name, p in Regressor().named_parameters()}

    class Looks(Regressor):
        def _look(self, where: str) -> None:
            trainable = sum(p.numel() for p in self.parameters() if p.requires_grad)
            counts[where] = (sum(p.numel() for p in self.parameters()), trainable)
            assert {name: tuple(p.shape) for name, p in self.named_parameters()} == shapes

        def setup(self, stage: str) -> None:
            self._look("setup")

        def on_fit_start(self) -> None:
            self._look("fit_start")

        def training_step(self, *args: Any) -> Any:
            self._look("training_step")
            return super().training_step(*args)

        def on_train_end(self) -> None:
            self._look("train_end")

    trainer = trainer_on_ranks(stage, max_steps=2)
    trainer.fit(Looks(), loader())
    total = sum(torch.Size(s).numel() for s in shapes.values())
    assert counts == dict.fromkeys(("setup", "fit_start", "training_step", "train_end"), (total, total))
    summary = L.pytorch.utilities.model_summary.ModelSummary(trainer.lightning_module)
    assert summary.total_parameters == summary.trainable_parameters == total


@ranks(2)
def test_released_values_are_refused_and_gathered_values_are_true() -> None:
    trainer, ours, alone, reference = fit_both(3, Regressor, max_steps=2)
    block = ours.blocks[1]  # type: ignore[index]
    for read in (
        lambda: block.up.weight.sum(),
        lambda: block.up.weight + 1,
        lambda: block.up.weight.data,
        lambda: block.up.weight[0],
        lambda: ours.state_dict(),
        lambda: block.up.weight.mul_(2),
        lambda: nn.init.zeros_(block.up.weight),
        lambda: block.up.weight.tolist(),
    ):
        with pytest.raises(ReleasedParameterError, match=r"blocks\.\d\.up\.weight|blocks\.0.*|gathered") as refusal:
            read()
        assert "strategy.gathered" in str(refusal.value)
    assert "sharded" in repr(block.up.weight)
    strategy = trainer.strategy
    assert isinstance(strategy, ZeROStrategy)
    with strategy.gathered(block.up.weight):
        assert torch.allclose(block.up.weight, reference.blocks[1].up.weight, rtol=1e-10)  # type: ignore[index]
    with strategy.gathered(ours), torch.no_grad():
        block.up.weight.fill_(0.5)
        ours.first.bias.add_(rank() * 0.0 + 1.0)
    with strategy.gathered(ours):
        assert bool((block.up.weight == 0.5).all())
        copies = everywhere(trainer, [p.detach().tolist() for p in ours.parameters()])
        assert copies[0] == copies[1]
    assert trainer.validate(ours, loader(), verbose=False)[0]["val_loss"] > 0


@ranks(2)
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_edits_inside_gathered_reach_training(stage: int) -> None:
    """A callback that clips weights, as a Wasserstein critic does, trains as in one process."""

    class Clamp(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if isinstance(trainer.strategy, ZeROStrategy):
                with trainer.strategy.gathered(module), torch.no_grad():
                    for p in module.parameters():
                        p.clamp_(-0.1, 0.1)
            else:
                with torch.no_grad():
                    for p in module.parameters():
                        p.clamp_(-0.1, 0.1)

    trainer, ours, alone, reference = fit_both(stage, Regressor, max_steps=4, callbacks=[Clamp()])
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_weight_penalty_in_training_step(stage: int) -> None:
    class Penalized(Regressor):
        def training_step(self, batch: Any, index: int) -> Any:
            return self.loss(batch) + 0.1 * sum(p.pow(2).sum() for p in self.parameters())

    trainer, ours, alone, reference = fit_both(stage, Penalized, max_steps=4)
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


@ranks(2)
def test_sharded_gradients_are_not_shown_as_none() -> None:
    class Reads(Regressor):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradient = self.last.weight.grad
            assert gradient is not None and gradient.shape == self.last.weight.shape
            gradient.norm()

    with pytest.raises(ShardedGradientError, match="grad_norms"):
        trainer_on_ranks(2, max_steps=1).fit(Reads(), loader())


@ranks(2)
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_module_zero_grad_means_the_same(stage: int) -> None:
    """Zeroing through the module in the middle of an accumulation drops what was summed, as in one process."""

    class Zeroes(Regressor):
        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if index % 4 == 2:
                self.blocks.zero_grad()

    trainer, ours, alone, reference = fit_both(stage, Zeroes, max_steps=2, accumulate_grad_batches=4)
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


# Freezing -------------------------------------------------------------------------------------------------------


class Unfreeze(BaseFinetuning):
    """Trains the last layer alone for an epoch, then everything."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.first, pl_module.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.first, pl_module.blocks], optimizer, lr=5e-3)


def only_trainable(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_unfreezing_between_epochs(stage: int, tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {"max_epochs": 3, "limit_train_batches": 3, "callbacks": [Unfreeze()]}

    ours, reference = Regressor(only_trainable), Regressor(only_trainable)
    trainer, alone = trainer_on_ranks(stage, **options()), trainer_alone(**options())
    trainer.fit(ours, loader())
    alone.fit(reference, loader(alone=True))
    assert_same_weights(weights(trainer, ours), weights(alone, reference))
    trainer.save_checkpoint(tmp_path / "unfrozen.ckpt")
    assert len(torch.load(tmp_path / "unfrozen.ckpt", weights_only=False)["optimizer_states"][0]["param_groups"]) == 2


@ranks(2)
@pytest.mark.parametrize("stage", (2, 3))
def test_frozen_parameters_own_no_gradient_and_no_state(stage: int) -> None:
    """Gradients and optimizer state of all ranks together: those of trainable parameters, plus padding."""

    class Partly(Regressor):
        def __init__(self) -> None:
            super().__init__(only_trainable)
            self.blocks.requires_grad_(False)
            self.blocks[0].up.bias.requires_grad_(True)  # type: ignore[index]

    module = Partly()
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    trainer = trainer_on_ranks(stage, max_steps=2)
    trainer.fit(module, loader())
    engine = trainer.strategy.engine  # type: ignore[attr-defined]
    gradients = sum(g.reduced.numel() for g in engine.groups if g.reduced is not None)
    state = sum(v.numel() for s in trainer.optimizers[0].state.values() for v in s.values() if v.ndim)
    everyone = everywhere(trainer, (gradients, state))
    groups = sum(g.trains for g in engine.groups)
    assert trainable <= sum(g for g, _ in everyone) <= trainable + groups * (world_size() - 1)
    assert sum(s for _, s in everyone) == 2 * trainable


@ranks(2)
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("sanity", (0, 2))
def test_modes_of_submodules_survive_validation(stage: int, sanity: int) -> None:
    class Halves(Regressor):
        def on_train_epoch_start(self) -> None:
            self.blocks[0].eval().requires_grad_(False)  # type: ignore[index]

        def on_train_batch_start(self, *_: Any) -> None:
            self.seen.append(f"{self.blocks[0].training}{self.blocks[1].training}")  # type: ignore[index]

    module = Halves()
    trainer = trainer_on_ranks(stage, max_epochs=2, num_sanity_val_steps=sanity, val_check_interval=2)
    trainer.fit(module, loader(), loader(seed=1))
    assert set(module.seen) == {"FalseTrue"}


# Data, logging, faults ------------------------------------------------------------------------------------------


class Uneven(IterableDataset[Any]):
    """Seven batches on rank 0, five on the others."""

    def __iter__(self) -> Any:
        for index in range(7 if rank() == 0 else 5):
            yield torch.full((8,), float(index), dtype=torch.float64), torch.zeros(3, dtype=torch.float64)


@ranks(2, 3)
@pytest.mark.parametrize("stage", (1, 3))
def test_uneven_data_stops_together(stage: int) -> None:
    trainer = trainer_on_ranks(stage, max_epochs=1)
    with pytest.warns(match="ran out of data after 5 batches.*rank 0: 2 batches") if rank() == 0 else no_warning():
        trainer.fit(Regressor(), DataLoader(Uneven(), 1), DataLoader(Uneven(), 1))
    assert everywhere(trainer, trainer.global_step) == [5] * world_size()


def no_warning() -> Any:
    from contextlib import nullcontext

    return nullcontext()


@ranks(2)
def test_uneven_data_can_be_an_error() -> None:
    strategy = ZeROStrategy(3, on_uneven="error")
    with pytest.raises(RankMismatchError, match="rank 1 ran out of data after 5 batches"):
        trainer_on_ranks(strategy, max_epochs=1).fit(Regressor(), DataLoader(Uneven(), 1))


@ranks(2)
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("where", ("training_step", "on_train_epoch_end"))
def test_logging_on_some_ranks_only_is_an_error_not_a_hang(stage: int, where: str) -> None:
    class Lopsided(Regressor):
        def training_step(self, batch: Any, index: int) -> Any:
            if where == "training_step" and rank() == 0:
                self.log("only_here", 1.0, sync_dist=True, on_step=True)
            return super().training_step(batch, index)

        def on_train_epoch_end(self) -> None:
            if where == "on_train_epoch_end" and rank() == 0:
                self.log("only_here", 1.0, sync_dist=True)

    with pytest.raises(RankMismatchError, match="sync_dist"):
        trainer_on_ranks(stage, max_epochs=2).fit(Lopsided(), loader())


@ranks(2, 4)
@pytest.mark.parametrize("stage", STAGES)
def test_logged_values_are_means_over_ranks(stage: int) -> None:
    trainer, _, alone, _ = fit_both(stage, Regressor, max_epochs=1, val=True)
    for key in ("train_loss", "val_loss"):
        values = everywhere(trainer, float(trainer.callback_metrics[key]))
        assert len(set(values)) == 1
        assert values[0] == pytest.approx(float(alone.callback_metrics[key]), rel=1e-6)


@ranks(2)
@pytest.mark.parametrize("stage", (1, 3))
def test_saving_on_one_rank_only_is_an_error_not_a_hang(stage: int, tmp_path: Path) -> None:
    class SavesAlone(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.is_global_zero:
                trainer.save_checkpoint(tmp_path / "alone.ckpt")

    with pytest.raises(RankMismatchError, match="rank 0 is saving a checkpoint"):
        trainer_on_ranks(stage, max_steps=3, callbacks=[SavesAlone()]).fit(Regressor(), loader())


class Poisoned(Regressor):
    """The loss is NaN at batch 2, on rank 1 only."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        return loss * float("nan") if index == 2 and rank() == 1 else loss


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_nan_on_one_rank_stops_or_skips_on_all(stage: int) -> None:
    steps: list[Any] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            steps.append(weights(trainer, module))

    strategy = ZeROStrategy(stage, on_nonfinite="skip")
    trainer = trainer_on_ranks(strategy, max_steps=4, callbacks=[Watch()])
    trainer.fit(Poisoned(), loader())
    assert everywhere(trainer, trainer.global_step) == [4, 4]
    assert_same_weights(steps[2], steps[1], rel=0.0)
    assert any(not torch.equal(steps[3][name], steps[2][name]) for name in steps[2])
    assert all(bool(torch.isfinite(value).all()) for value in steps[3].values())


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "manual"])
def test_a_nan_in_any_accumulated_batch_skips_the_step(stage: int, by_hand: bool) -> None:
    """Batch 2 is the first of the two whose gradients the second step would apply; the batch after it is sound."""
    steps: list[Any] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            steps.append(weights(trainer, module))

    class ByHand(Poisoned):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(super().training_step(batch, index))
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()

    strategy = ZeROStrategy(stage, on_nonfinite="skip")
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 6, "callbacks": [Watch()]}
    module = ByHand() if by_hand else Poisoned()
    module.automatic_optimization = not by_hand
    trainer = trainer_on_ranks(strategy, **options, **({} if by_hand else {"accumulate_grad_batches": 2}))
    trainer.fit(module, loader())
    assert len(steps) == 6
    assert_same_weights(steps[3], steps[1], rel=0.0)
    for before, after in ((0, 1), (3, 5)):
        assert any(not torch.equal(steps[before][name], steps[after][name]) for name in steps[after])
    assert all(bool(torch.isfinite(value).all()) for value in steps[5].values())


class AllPoisoned(Poisoned):
    """The same on every rank."""

    def training_step(self, batch: Any, index: int) -> Any:
        return self.loss(batch) * (float("inf") if index == 2 else 1.0)


@ranks(2)
def test_nan_is_named_by_rank_and_batch() -> None:
    with pytest.raises((NonFiniteLossError, PeerLostError), match=r"inf on rank \d at batch 2 of epoch 0"):
        trainer_on_ranks(2, max_steps=4).fit(AllPoisoned(), loader())


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_one_line_at_setup(stage: int) -> None:
    with told() as lines:
        trainer_on_ranks(stage, max_steps=1).fit(Regressor(), loader())
    found = [line for line in lines if line.startswith(f"zero{stage} over 2 ranks")]
    assert len(found) == (1 if rank() == 0 else 0)
    for word in ("parameters", "gradients", "units, the largest", "per step"):
        assert all(word in line for line in found)
