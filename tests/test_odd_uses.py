"""Odd uses that once crashed, hung or lost something: each must train as one process does, or be refused by name."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist import ZeROStrategy
from lightning_dist.comm import Mesh
from lightning_dist.core.errors import (
    ConfigurationError,
    LightningDistError,
    RankMismatchError,
    UnsupportedModelError,
)
from lightning_dist.core.layout import Layout
from lightning_dist.zero import ZeroEngine
from tests.harness import rank, ranks, world_size
from tests.lit import Regressor, assert_same_weights, fit_both, loader, trainer_on_ranks, weights

STAGES = (0, 1, 2, 3)


class Scaled(Regressor):
    """A parameter of the root takes part in the forward, outside of any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class TwoBackwards(Scaled):
    """Two graphs, two backwards, one step, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self(batch[0]).pow(2).mean(), self(2 * batch[0]).mean()
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(first)
        self.manual_backward(second)
        optimizer.step()  # type: ignore[union-attr]


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_two_backwards_of_two_graphs(stage: int) -> None:
    trainer, ours, alone, reference = fit_both(stage, TwoBackwards, max_steps=3)
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


class Clamps(Regressor):
    """Writes weights in place inside the training step."""

    def training_step(self, batch: Any, index: int) -> Any:
        with torch.no_grad():
            self.blocks[0].up.weight.clamp_(-0.2, 0.2)  # type: ignore[index]
        return self.loss(batch)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_writes_inside_a_step_are_kept(stage: int) -> None:
    trainer, ours, alone, reference = fit_both(stage, Clamps, max_steps=3)
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


@ranks(2)
@pytest.mark.parametrize("stage", (0, 1, 2))
def test_writes_to_rounded_copies_reach_the_masters(stage: int) -> None:
    class Late(Regressor):
        def __init__(self) -> None:
            super().__init__(lambda m: torch.optim.SGD(m.parameters(), lr=0.0))
            self.float()

        def loss(self, batch: Any) -> Tensor:
            return self(batch[0].float()).float().pow(2).mean()

        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                self.first.weight.fill_(0.25)

    module = Late()
    trainer = trainer_on_ranks(stage, max_steps=3, precision="bf16-mixed")
    trainer.fit(module, loader())
    assert bool((weights(trainer, module)["first.weight"] == 0.25).all())


@ranks(2)
def test_a_saved_tensor_that_was_modified_is_noticed() -> None:
    class Modifies(Regressor):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)  # type: ignore[no-any-return]

    module = Modifies()

    def in_place(x: Tensor) -> Tensor:
        y = torch.tanh(module.blocks[0].up(x))  # type: ignore[index,operator]
        y.mul_(2)
        return x + module.blocks[0].down(y)  # type: ignore[index,operator,no-any-return]

    module.blocks[0].forward = in_place  # type: ignore[index,method-assign]
    with pytest.raises(RuntimeError, match=r"modified in place|modified by an inplace"):
        trainer_on_ranks(3, max_steps=1).fit(module, loader())


@ranks(2)
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("difference", ["depth", "width", "frozen"])
def test_ranks_that_build_different_models(stage: int, difference: str) -> None:
    model: nn.Module = nn.ModuleList([nn.Linear(4, 4) for _ in range(2 + (rank() if difference == "depth" else 0))])
    if difference == "width":
        model.append(nn.Linear(4 + rank(), 4))  # type: ignore[operator]
    if difference == "frozen" and rank() == 1:
        model[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(RankMismatchError, match="different models") as refusal:
        ZeroEngine(model, Mesh.from_world(Layout(dp=world_size())), stage=stage)
    assert "rank 1 has" in str(refusal.value)


@ranks(2)
def test_freezing_on_one_rank_only() -> None:
    class Lopsided(Regressor):
        def on_train_epoch_start(self) -> None:
            if rank() == 1:
                self.blocks[0].requires_grad_(False)  # type: ignore[index]

    with pytest.raises(RankMismatchError, match="trains"):
        trainer_on_ranks(2, max_steps=1).fit(Lopsided(), loader())


@ranks(2)
@pytest.mark.parametrize("stage", (0, 2))
def test_parameters_added_after_setup(stage: int) -> None:
    class Grows(Regressor):
        def on_train_epoch_start(self) -> None:
            self.extra = nn.Linear(3, 3).double()
            self.optimizers().add_param_group({"params": list(self.extra.parameters())})  # type: ignore[union-attr]

    with pytest.raises(ConfigurationError, match="not in the module"):
        trainer_on_ranks(stage, max_steps=2).fit(Grows(), loader())


@ranks(2)
def test_parameters_tied_by_memory() -> None:
    module = Regressor()
    module.blocks[1].up.weight.data = module.blocks[0].up.weight.data  # type: ignore[index,union-attr]
    with pytest.raises(UnsupportedModelError, match=r"share memory.*b\.weight = a\.weight"):
        trainer_on_ranks(2, max_steps=1).fit(module, loader())


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_float_inputs_into_a_normalization_under_bf16(stage: int) -> None:
    class Normed(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.float()

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.last(x)  # type: ignore[no-any-return]

        def loss(self, batch: Any) -> Tensor:
            return nn.functional.mse_loss(self(batch[0].float()).float(), batch[1].float())

    trainer = trainer_on_ranks(stage, max_steps=2, precision="bf16-mixed")
    trainer.fit(Normed(), loader())
    assert trainer.global_step == 2


@ranks(2)
def test_misuse_of_steps_in_a_plain_loop() -> None:
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    engine = ZeroEngine(model, Mesh.from_world(Layout(dp=2)), stage=3)
    with engine.step():
        loss = model[0](torch.ones(1, 4)).sum()
        with pytest.raises(LightningDistError, match="do not nest"), engine.step("eval"):
            pass
    with pytest.raises(LightningDistError, match="outside a step"):
        engine.backward(loss)


@ranks(2)
def test_a_module_without_parameters() -> None:
    class Empty(Regressor):
        def __init__(self) -> None:
            super().__init__()
            del self.first, self.blocks, self.last

        def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", batch[0].mean(), sync_dist=True)

    out = trainer_on_ranks(ZeROStrategy(3)).validate(Empty(), loader(), verbose=False)
    assert "val_loss" in out[0]


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_outlives_the_module(stage: int) -> None:
    """A script that makes one Trainer after another must not keep every model it ever had."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    engine = ZeroEngine(model, Mesh.from_world(Layout(dp=2)), stage=stage)
    optimizer = torch.optim.AdamW(model.parameters())
    engine.adopt(optimizer)
    with engine.step():
        engine.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    left = [weakref.ref(thing) for thing in (engine, engine.mesh, model, model[0].weight)]
    del engine, optimizer, model
    gc.collect()
    assert [ref() for ref in left] == [None] * 4


class Breaks(torch.autograd.Function):
    """Passes its input on, and fails in backward when told to."""

    broken = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if Breaks.broken:
            raise FloatingPointError("on purpose")
        return gradient


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("sync", (True, False))
def test_training_goes_on_after_a_backward_that_failed(stage: int, sync: bool) -> None:
    """What had arrived before the failure, on all ranks alike, is no part of the next gradient."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return model[2](Breaks.apply(model[1](model[0](x)))).pow(2).mean()  # type: ignore[index,no-any-return]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]).double()

    model, reference = build(), build()
    engine = ZeroEngine(model, Mesh.from_world(Layout(dp=2)), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.adopt(optimizer)
    x = torch.arange(12.0).double().view(2, 6) / 12
    Breaks.broken = True
    with pytest.raises(FloatingPointError), engine.step():
        engine.backward(losses(model, x), sync=sync)
    Breaks.broken = False
    optimizer.zero_grad()
    with engine.step():
        engine.backward(losses(model, x))
    optimizer.step()
    losses(reference, x).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    with engine.gathered(model):
        got = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert_same_weights(got, {n: p.detach() for n, p in reference.named_parameters()})


@ranks(2)
@pytest.mark.parametrize("stage", (1, 3))
def test_backwards_that_fail_at_different_points(stage: int) -> None:
    """What one rank has begun to send cannot be taken back: the ranks say so in place of hanging."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).double()
    engine = ZeroEngine(model, Mesh.from_world(Layout(dp=2)), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.adopt(optimizer)
    x = torch.ones(2, 6, dtype=torch.float64)
    with engine.step():
        engine.backward(model(x).sum())  # from now on the order of reductions is known
    optimizer.zero_grad()
    place = 1 if rank() == 0 else 3
    engine.begin_step()
    y = x
    for index, layer in enumerate(model):
        y = Breaks.apply(layer(y)) if index == place else layer(y)
    Breaks.broken = True
    with pytest.raises((FloatingPointError, RankMismatchError)):
        engine.backward(y.sum())
    Breaks.broken = False
    with pytest.raises(RankMismatchError):
        engine.backward(model(x).sum())
