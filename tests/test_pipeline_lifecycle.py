"""`Trainer(strategy="pp")` from setup to the end: refusals, failures, precision, checkpoints, other strategies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import PipelineParallelStrategy, TensorParallelStrategy, ZeROStrategy
from lightning_dist.core.errors import ConfigurationError, LightningDistError, PeerLostError
from tests.harness import rank, ranks, world_size
from tests.lit import trainer_alone, trainer_on_ranks
from tests.pp.lit import Small, everywhere, points
from tests.tp.lit import assert_same, whole_weights

# Refusals: in words, on all ranks, without waiting for one that has stopped ------------------------------------


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class NeverCalls(Small):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.first(batch[0]).mean()  # type: ignore[no-any-return]


class CallsTwice(Small):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.loss(batch) + self.loss(batch)


class Swallows(Small):
    def training_step(self, batch: Any, index: int) -> Tensor:
        try:
            return self.loss(batch)
        except BaseException:
            return self.first.weight.sum()


class ReturnsText(Small):
    def training_step(self, batch: Any, index: int) -> Any:
        self.loss(batch)
        return "done"


class FailsOnOneStage(Small):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 1 and rank() == self.stage:
            raise ZeroDivisionError("the disk is full")


def lbfgs(module: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(module.parameters())


def no_tensors() -> DataLoader[Any]:
    return DataLoader([["a", "b"]], batch_size=None)  # type: ignore[arg-type]


def unlike() -> DataLoader[Any]:
    return DataLoader([(torch.zeros(4, 6).double(), torch.zeros(3, 3).double())], batch_size=None)  # type: ignore[arg-type]


REFUSALS: dict[str, tuple[Callable[[], L.LightningModule], dict[str, Any], Callable[[], Any], tuple[str, ...]]] = {
    "manual": (Manual, {}, points, ("manual optimization", "zero3")),
    "stages": (Small, {"schedule": "interleaved", "virtual_stages": 9}, points, ("8", "layers")),
    "split": (Small, {"split": [3, 3]}, points, ("split", "8")),
    "no tensors": (Small, {}, no_tensors, ("split_batch",)),
    "unlike": (Small, {}, unlike, ("disagree", "(4, 6)", "(3, 3)")),
    "never": (NeverCalls, {}, points, ("blocks.0", "layers=")),
    "twice": (CallsTwice, {}, points, ("second pass", "generate")),
    "swallows": (Swallows, {}, points, ("except",)),
    "text": (ReturnsText, {}, points, ("str", "loss")),
    "lbfgs": (lambda: Small(lbfgs), {}, points, ("LBFGS", "AdamW")),
}


@ranks(2)
@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(what: str) -> None:
    make, options, data, words = REFUSALS[what]
    strategy = PipelineParallelStrategy(**options)
    with pytest.raises(LightningDistError) as refusal:
        trainer_on_ranks(strategy, max_epochs=1).fit(make(), data())
    for word in words:
        assert word in str(refusal.value), str(refusal.value)


class Generates(Small):
    def validation_step(self, batch: Any, index: int) -> None:
        out = self(batch[0])
        self(torch.cat([out, out], 1))


@ranks(2)
def test_generate_in_validation_is_refused() -> None:
    with pytest.raises(LightningDistError, match="generate"):
        trainer_on_ranks(PipelineParallelStrategy(), max_epochs=1).validate(Generates(), points(), verbose=False)


MEETINGS: dict[str, Callable[[L.LightningModule], object]] = {
    "all_gather": lambda module: module.all_gather(torch.ones(2)),
    "barrier": lambda module: module.trainer.strategy.barrier("here"),
    "broadcast": lambda module: module.trainer.strategy.broadcast(1),
    "reduce": lambda module: module.trainer.strategy.reduce(torch.ones(2)),
    "decision": lambda module: module.trainer.strategy.reduce_boolean_decision(True),
    "save": lambda module: module.trainer.save_checkpoint("never.ckpt"),
}


class Meets(Small):
    """Communicates in the middle of a step."""

    def __init__(self, what: str, place: str) -> None:
        super().__init__()
        self.meet, self.place = MEETINGS[what], place

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.place == "ahead":
            self.meet(self)
        loss = self.loss(batch)
        self.meet(self)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.training_step(batch, index)


@ranks(2, timeout=60)
@pytest.mark.parametrize("call", ["fit", "validate"])
@pytest.mark.parametrize(("what", "place"), [*((what, "behind") for what in MEETINGS), ("all_gather", "ahead")])
def test_communication_in_a_step_is_refused(what: str, place: str, call: str) -> None:
    """On the rank that comes to it; the others stop, and do not wait."""
    trainer = trainer_on_ranks(PipelineParallelStrategy(), max_epochs=1)
    itself = rank() == 1 or place == "ahead"
    error = ConfigurationError if itself else PeerLostError
    with pytest.raises(error, match=r"cannot communicate.*on_train_batch_end"):
        getattr(trainer, call)(Meets(what, place), points())


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(LightningDistError, match="num_micro_batches"):
        PipelineParallelStrategy(num_micro_batches=4)
    with pytest.raises(LightningDistError, match="selective"):
        PipelineParallelStrategy(recompute="selective")  # type: ignore[arg-type]


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_failure_on_one_stage_stops_the_others(stage: int) -> None:
    trainer = trainer_on_ranks(PipelineParallelStrategy(), max_epochs=1)
    with pytest.raises(ZeroDivisionError if rank() == stage else PeerLostError, match="the disk is full"):
        trainer.fit(FailsOnOneStage(stage), points())


# Memory ---------------------------------------------------------------------------------------------------------


def held_bytes(module: nn.Module) -> int:
    """Of all parameters, each storage once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    return sum(storages.values())


@ranks(2)
def test_parameters_of_other_stages_take_no_memory() -> None:
    module = Small()
    whole = held_bytes(module)
    trainer = trainer_on_ranks(PipelineParallelStrategy(), max_steps=1)
    trainer.fit(module, points())
    mine = sum(p.numel() * 8 for p in module.parameters() if trainer.strategy.pipeline.is_here(p))  # type: ignore[attr-defined]
    absent = sum(1 for p in module.parameters() if not trainer.strategy.pipeline.is_here(p))  # type: ignore[attr-defined]
    assert absent >= 8
    assert held_bytes(module) <= mine + 8 * absent
    assert sum(everywhere(trainer, mine)) == whole
    moments = sum(v.numel() * 8 for s in trainer.optimizers[0].state.values() for v in s.values() if v.ndim)
    assert moments <= 2 * mine


# Precision ------------------------------------------------------------------------------------------------------


class Single(Small):
    """In float32, or what the flag makes of it."""

    def __init__(self, make_optimizer: Any = None, *, frozen: int = 0) -> None:
        super().__init__(make_optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=0.1)))
        self.float()
        if frozen:
            self.first.requires_grad_(False)
            self.blocks[:frozen].requires_grad_(False)  # type: ignore[union-attr]
        self.overflow_at = -1

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = (t.float() for t in batch)
        out = self(inputs.to(self.first.weight.dtype))
        loss = nn.functional.mse_loss(out.float(), targets)
        return loss * (1e30 if self.trainer.fit_loop.total_batch_idx == self.overflow_at else 1.0)


def options_of(flag: str) -> dict[str, Any]:
    if flag == "16-mixed":  # Lightning turns the flag into bf16-mixed on the CPU
        return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))]}
    return {"precision": flag}


@ranks(2)
@pytest.mark.parametrize("frozen", [0, 6], ids=["all", "frozen"])
@pytest.mark.parametrize(
    ("flag", "near"), [("32-true", 1e-5), ("bf16-mixed", 0.05), ("bf16-true", 0.1), ("16-mixed", 0.01)]
)
def test_precision(flag: str, near: float, frozen: int) -> None:
    """As one process with the same flag, as far as rounding lets it; frozen stages hold no gradient at all."""
    module, alone = Single(frozen=frozen), Single(frozen=frozen)
    ours = trainer_on_ranks(PipelineParallelStrategy(num_microbatches=4), max_epochs=2, **options_of(flag))
    theirs = trainer_alone(max_epochs=2, **options_of(flag))
    ours.fit(module, points())
    theirs.fit(alone, points())
    start = dict(Single().named_parameters())
    moved = 0.0
    for name, value in whole_weights(ours, module).items():
        want = dict(alone.named_parameters())[name].detach()
        assert value.dtype == want.dtype
        step = float((want.float() - start[name].detach()).abs().max())
        moved += step
        assert float((value.float() - want.float()).abs().max()) <= near * max(step, 0.02), name
    assert moved > 0.1


@ranks(2)
@pytest.mark.parametrize("frozen", [0, 6], ids=["all", "frozen"])
def test_an_overflow_skips_the_step_on_all_stages(frozen: int) -> None:
    seen: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append(float(trainer.precision_plugin.scaler.get_scale()))

    module = Single(frozen=frozen)
    module.overflow_at = 1
    strategy = PipelineParallelStrategy(num_microbatches=2, on_nonfinite="ignore")
    trainer = trainer_on_ranks(strategy, max_epochs=1, callbacks=[Watch()], **options_of("16-mixed"))
    trainer.fit(module, points())
    assert seen == [2.0**8, 2.0**7, 2.0**7]
    for value in whole_weights(trainer, module).values():
        assert value.isfinite().all()


# Averaging ------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_weight_averaging_equals_one_process(kind: str) -> None:
    make: dict[str, Callable[[], L.Callback]] = {
        "ema": lambda: EMAWeightAveraging(decay=0.5),
        "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1),
    }
    module, alone = Small(), Small()
    ours = trainer_on_ranks(PipelineParallelStrategy(num_microbatches=2), max_epochs=3, callbacks=[make[kind]()])
    theirs = trainer_alone(max_epochs=3, callbacks=[make[kind]()])
    ours.fit(module, points(), points(8))
    theirs.fit(alone, points(), points(8))
    assert_same(ours, module, alone)


# Other strategies and checkpoints -------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("then", ["pp", "zero3", "zero0", "interleaved"])
def test_a_module_goes_on_under_another_strategy(then: str) -> None:
    strategies: dict[str, Callable[[], Any]] = {
        "pp": lambda: PipelineParallelStrategy(num_microbatches=4),
        "interleaved": lambda: PipelineParallelStrategy(schedule="interleaved", virtual_stages=2),
        "zero3": lambda: ZeROStrategy(3),
        "zero0": lambda: ZeROStrategy(0),
    }
    module, alone = Small(), Small()
    for name in ("pp", then, "pp"):
        share = {"replicas": world_size(), "replica": rank()} if name.startswith("zero") else {}
        trainer = trainer_on_ranks(strategies[name](), max_epochs=1)
        trainer.fit(module, points(16, **share))
        trainer_alone(max_epochs=1).fit(alone, points(16))
        assert_same(trainer, module, alone)


def trained(kind: str, epochs: int, path: Path | None = None) -> tuple[L.Trainer, Small]:
    strategies: dict[str, Callable[[], Any]] = {
        "pp": lambda: PipelineParallelStrategy(num_microbatches=4),
        "zbv": lambda: PipelineParallelStrategy(num_microbatches=4, schedule="zbv"),
        "zero3": lambda: ZeROStrategy(3),
        "tp": lambda: TensorParallelStrategy(),
    }
    module = Small()
    if kind == "tp":
        module.tp_plan = {"blocks.*.0": "colwise_gather"}  # type: ignore[assignment]
    share = {"replicas": world_size(), "replica": rank()} if kind == "zero3" else {}
    if kind == "alone":
        trainer = trainer_alone(max_epochs=epochs)
    else:
        trainer = trainer_on_ranks(strategies[kind](), max_epochs=epochs)
    trainer.fit(module, points(16, **share), ckpt_path=path)
    return trainer, module


@ranks(2)
@pytest.mark.parametrize(
    ("wrote", "reads"),
    [("pp", "pp"), ("pp", "zero3"), ("zero3", "pp"), ("pp", "alone"), ("alone", "zbv"), ("zbv", "pp")],
)
def test_resuming_from_checkpoints(wrote: str, reads: str, tmp_path: Path) -> None:
    path = tmp_path / "made.ckpt"
    first, _ = trained(wrote, 1)
    if wrote != "alone" or rank() == 0:
        first.save_checkpoint(path)
    torch.distributed.barrier()
    second, module = trained(reads, 2, path)
    _, reference = trained("alone", 2)
    assert second.global_step == 4
    if reads == "alone":
        for one, other in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    else:
        assert_same(second, module, reference)


@ranks(2)
def test_a_checkpoint_is_what_one_process_writes(tmp_path: Path) -> None:
    ours, _ = trained("pp", 1)
    ours.save_checkpoint(tmp_path / "ours.ckpt")
    if rank():
        return
    alone, _ = trained("alone", 1)
    alone.save_checkpoint(tmp_path / "alone.ckpt")
    got, want = (torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in ("ours", "alone"))
    assert got.keys() == want.keys()
    assert list(got["state_dict"]) == list(want["state_dict"])
    for key, value in want["state_dict"].items():
        torch.testing.assert_close(got["state_dict"][key], value, rtol=1e-9, atol=1e-9)
    mine, theirs = got["optimizer_states"][0], want["optimizer_states"][0]
    assert mine["param_groups"] == theirs["param_groups"]
    assert list(mine["state"]) == list(theirs["state"])
    assert got["loops"] == want["loops"]
    for number, state in theirs["state"].items():
        assert mine["state"][number].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][number][key], value, rtol=1e-7, atol=1e-9)


@ranks(2)
def test_whole_weights_are_read_and_written() -> None:
    module = Small()
    trainer = trainer_on_ranks(PipelineParallelStrategy(), max_epochs=1)
    trainer.fit(module, points())
    strategy: Any = trainer.strategy
    before = whole_weights(trainer, module)
    with strategy.gathered(module):
        for parameter in module.parameters():
            parameter.data.mul_(2)
        twin = copy.deepcopy(module)
    state = strategy.full_state_dict()
    for name, value in whole_weights(trainer, module).items():
        assert torch.equal(value, 2 * before[name])
        assert torch.equal(value, dict(twin.named_parameters())[name])
        assert state[name].is_meta if rank() else torch.equal(state[name], value)
    assert len(set(map(str, everywhere(trainer, before)))) == 1


class Normed(Small):
    """Batch statistics, and a buffer that grows, in layers that other stages compute."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen = torch.cat([self.seen, torch.ones(1)])
            return x

    def __init__(self) -> None:
        super().__init__()
        width = range(len(self.blocks))
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), self.Counts(), nn.Tanh()) for _ in width]
        )
        self.double()


@ranks(2, 4)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_gathered_shows_the_buffers_of_other_stages(schedule: str) -> None:
    module, alone = Normed(), Normed()
    strategy = PipelineParallelStrategy(pp=2, num_microbatches=1, schedule=schedule)
    ours, theirs = trainer_on_ranks(strategy, max_epochs=1), trainer_alone(max_epochs=1)
    share = {"replicas": world_size() // 2, "replica": rank() % (world_size() // 2)}
    for _ in range(2):  # what has changed since the first time travels
        ours.fit(module, points(16, **share))
        theirs.fit(alone, points(16))
        with ours.strategy.gathered(module):  # type: ignore[attr-defined]
            copied = {name: buffer.clone() for name, buffer in copy.deepcopy(module).named_buffers()}
        assert len(copied) == 4 * 8
        saved = everywhere(ours, ours.strategy.full_state_dict())[0]  # type: ignore[attr-defined]
        for name, said in copied.items():
            expected = dict(alone.named_buffers())[name]
            assert name not in saved or torch.equal(said, saved[name]), name
            assert all(torch.equal(said, other[name]) for other in everywhere(ours, copied)), name
            if world_size() == 2:
                torch.testing.assert_close(said, expected, msg=name)
        ours.fit_loop.max_epochs = theirs.fit_loop.max_epochs = 2
    with strategy.mesh.ledger.measure() as sent, ours.strategy.gathered(module):  # type: ignore[attr-defined]
        pass
    assert sent.count(purpose="buffers") == 0
