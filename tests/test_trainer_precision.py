"""One table of precision, one test per cell: dtypes of masters, compute, reduction, moments and checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_dist import ZeROStrategy
from tests.harness import rank, ranks
from tests.lit import Regressor, assert_same_weights, loader, trainer_alone, trainer_on_ranks, weights

STAGES = (0, 1, 2, 3)
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

TABLE: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "32-true": (FP32, FP32),
    "64-true": (FP64, FP64),
    "bf16-mixed": (FP32, BF16),
    "16-mixed": (FP32, FP16),
    "bf16-true": (BF16, BF16),
    "bf16-true+master": (FP32, BF16),
}
"""flag -> (masters, moments, reduction and checkpoint; values that compute)"""


class Single(Regressor):
    """In float32, with data cast to what its layers compute in."""

    def __init__(self) -> None:
        super().__init__(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
        self.float()
        self.dtypes: dict[str, torch.dtype] = {}

    def loss(self, batch: Any) -> Any:
        inputs, targets = (t.float() for t in batch)
        x = inputs.to(self.first.weight.dtype)
        self.dtypes["compute"] = self.first.weight.dtype
        return torch.nn.functional.mse_loss(self(x).float(), targets)


def options_of(flag: str) -> dict[str, Any]:
    if flag == "16-mixed":  # Lightning turns the flag into bf16-mixed on the CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    return {"precision": flag.removesuffix("+master")}


def strategy_of(flag: str, stage: int) -> ZeROStrategy:
    return ZeROStrategy(stage, master_weights=flag.endswith("+master"))


@ranks(2)
@pytest.mark.parametrize("flag", TABLE)
def test_the_table(flag: str, tmp_path: Path) -> None:
    master, compute = TABLE[flag]
    swept = 0
    for stage in STAGES:
        module = Single()
        trainer = trainer_on_ranks(strategy_of(flag, stage), max_steps=3, **options_of(flag))
        trainer.fit(module, loader())
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        assert module.dtypes["compute"] == compute
        assert {p.dtype for p in module.parameters()} == {compute}
        assert {g.owned.dtype for g in engine.groups} == {master}
        assert {g.reduced.dtype for g in engine.groups if g.reduced is not None} == {master}
        state = trainer.optimizers[0].state
        assert {v.dtype for s in state.values() for v in s.values() if v.ndim} == {master}
        trainer.save_checkpoint(tmp_path / f"{stage}.ckpt")
        saved = torch.load(tmp_path / f"{stage}.ckpt", weights_only=False)
        assert {v.dtype for v in saved["state_dict"].values()} == {master}
        for found in weights(trainer, module).values():
            assert found.dtype == master
        swept += 1
    assert swept == 4


class Crawling(L.LightningModule):
    """A weight of 1 that each step moves by 1e-4: below half a unit in the last place of bfloat16 at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.weight.float().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


@ranks(2)
@pytest.mark.parametrize("flag", ["bf16-mixed", "bf16-true+master", "bf16-true"])
def test_small_updates_are_kept_by_masters(flag: str) -> None:
    """100 updates of 1e-4: a master moves by 0.01, a bfloat16 weight does not move at all."""
    for stage in STAGES:
        trainer = trainer_on_ranks(strategy_of(flag, stage), max_steps=100, **options_of(flag))
        module = Crawling()
        trainer.fit(module, loader(samples=400))
        moved = 1.0 - float(weights(trainer, module)["weight"].float().mean())
        assert moved == pytest.approx(0.0 if flag == "bf16-true" else 0.01, abs=1e-5)


@ranks(2)
def test_mixed_precision_is_close_to_one_process() -> None:
    """bf16-mixed rounds weights where DDP's autocast does; both follow the float32 run."""
    exact = Single()
    alone = trainer_alone(max_steps=10)
    alone.fit(exact, loader(alone=True))
    for stage in STAGES:
        module = Single()
        trainer = trainer_on_ranks(stage, max_steps=10, precision="bf16-mixed")
        trainer.fit(module, loader())
        assert_same_weights(weights(trainer, module), weights(alone, exact), rel=0.1)


class Overflowing(Single):
    """The gradient overflows at batch 1, on rank 1 only."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        return loss + (self.first.weight.float() * 1e30).sum() * 1e5 if index == 1 and rank() == 1 else loss


@ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for stage in STAGES:
        seen: list[tuple[float, dict[str, torch.Tensor]]] = []

        class Watch(L.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
                seen.append((trainer.precision_plugin.scaler.get_scale(), weights(trainer, module)))  # noqa: B023

        strategy = ZeROStrategy(stage, on_nonfinite="ignore")
        trainer = trainer_on_ranks(strategy, max_steps=4, callbacks=[Watch()], **options_of("16-mixed"))
        trainer.fit(Overflowing(), loader())
        assert [scale for scale, _ in seen] == [256.0, 128.0, 128.0, 128.0]
        assert_same_weights(seen[1][1], seen[0][1], rel=0.0)
        assert any(not torch.equal(seen[2][1][n], seen[1][1][n]) for n in seen[1][1])


@ranks(2)
def test_loss_scaling_survives_a_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_on_ranks(3, max_epochs=1, limit_train_batches=2, **options_of("16-mixed"))
    trainer.fit(Single(), loader())
    trainer.save_checkpoint(tmp_path / "scaled.ckpt")
    assert torch.load(tmp_path / "scaled.ckpt", weights_only=False)["MixedPrecision"]["scale"] == 256.0
    again = trainer_on_ranks(3, max_epochs=2, limit_train_batches=2, **options_of("16-mixed"))
    again.fit(Single(), loader(), ckpt_path=tmp_path / "scaled.ckpt")
    assert again.global_step == 4
