"""What user code writes into parameters and gradients, by whatever way, counts as it does in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_dist import ZeROStrategy
from lightning_dist.comm import Mesh
from lightning_dist.core.errors import LightningDistError
from lightning_dist.core.layout import Layout
from lightning_dist.zero import ZeroEngine
from tests.harness import ranks, world_size
from tests.lit import Regressor, assert_same_weights, fit_both, loader, trainer_on_ranks, weights

STAGES = (0, 1, 2, 3)


def replaced(module: Any) -> None:
    """New data for a matrix, in every way that keeps its shape: a new tensor, a view of the old one."""
    module.blocks[0].up.weight.data = module.blocks[0].up.weight.data.clamp(-0.05, 0.05)
    module.first.weight.data = module.first.weight.data.t()
    module.last.bias.data = torch.zeros(3, dtype=torch.float64)


class Replaces(Regressor):
    """Assigns ``parameter.data`` in one hook."""

    where = ""

    def training_step(self, batch: Any, index: int) -> Any:
        if self.where == "training_step":
            replaced(self)
        return super().training_step(batch, index)

    def on_after_backward(self) -> None:
        if self.where == "on_after_backward":
            self._replace()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.where == "on_before_optimizer_step":
            self._replace()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.where == "on_train_batch_end":
            self._replace()

    def _replace(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ZeROStrategy) and strategy.stage == 3:
            with strategy.gathered(self):
                replaced(self)
        else:
            replaced(self)


HOOKS = ("training_step", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")


@ranks(2)
@pytest.mark.filterwarnings("ignore:.*is read outside the forward")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", HOOKS)
def test_assigned_data_counts(stage: int, where: str) -> None:
    def make() -> Replaces:
        module = Replaces()
        module.where = where
        return module

    trainer, ours, alone, reference = fit_both(stage, make, max_steps=3)
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mixed", (False, True))
def test_data_assigned_inside_gathered_counts(stage: int, mixed: bool) -> None:
    """Under mixed precision the masters take the values over, unrounded."""
    module = Halves("")
    value = torch.tensor(1 / 3)
    trainer = trainer_on_ranks(stage, max_steps=1, precision="bf16-mixed" if mixed else "32-true")
    trainer.fit(module, loader())
    strategy = trainer.strategy
    assert isinstance(strategy, ZeROStrategy)
    with strategy.gathered(module):
        weight = module.layers[1].weight
        weight.data = torch.full((8, 8), float(value))  # type: ignore[union-attr]
    assert bool((weights(trainer, module)["layers.1.weight"] == value).all())
    trainer.predict(module, loader())
    assert bool((weights(trainer, module)["layers.1.weight"] == value).all())


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_assigned_data_is_in_the_next_checkpoint(stage: int) -> None:
    module = Regressor()
    trainer = trainer_on_ranks(stage, max_steps=1)
    trainer.fit(module, loader())
    with trainer.strategy.gathered(module):  # type: ignore[attr-defined]
        module.last.weight.data = torch.full((3, 8), 2.0, dtype=torch.float64)
        kept = module.last.weight
    if stage < 3:
        module.first.weight.data = torch.full((8, 8), 3.0, dtype=torch.float64)
    state = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    if state["last.weight"].is_meta:
        return
    assert bool((state["last.weight"] == 2.0).all())
    assert stage == 3 or bool((state["first.weight"] == 3.0).all())
    assert kept is module.last.weight


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("new", [torch.zeros(4), torch.zeros(8, 8, dtype=torch.float16)], ids=["shape", "dtype"])
def test_data_of_another_kind_is_refused(stage: int, new: Tensor) -> None:
    module = Regressor()
    trainer = trainer_on_ranks(stage, max_steps=1)
    trainer.fit(module, loader())
    before = weights(trainer, module)
    with pytest.raises(LightningDistError, match=r"first\.weight\.data .*shape \((4,|8, 8)\).*configure_model"):  # noqa: SIM117
        with trainer.strategy.gathered(module):  # type: ignore[attr-defined]
            module.first.weight.data = new
    assert_same_weights(weights(trainer, module), before, rel=0.0)
    if stage < 3:
        module.first.weight.data = new
        with pytest.raises(LightningDistError, match=r"first\.weight\.data"):
            trainer.validate(module, loader(), verbose=False)


# Gradients ------------------------------------------------------------------------------------------------------


class EditsGradients(Regressor):
    """Drops one gradient, doubles another, gives one to a parameter that has none."""

    def __init__(self) -> None:
        super().__init__(lambda m: torch.optim.AdamW(m.parameters(), 1e-2, weight_decay=0.3))
        self.spare = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ZeROStrategy):
            with strategy.gathered(self, gradients=True):
                self._edit()
        else:
            self._edit()

    def _edit(self) -> None:
        self.blocks[0].up.weight.grad = None  # type: ignore[index,union-attr]
        self.blocks[0].up.bias.grad = 2 * self.blocks[0].up.bias.grad  # type: ignore[index,union-attr,operator]
        self.blocks[2].down.weight.grad.mul_(3)  # type: ignore[index,union-attr]
        self.spare.grad = torch.full_like(self.spare, 0.5)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulate", (1, 2))
def test_gradients_edited_inside_gathered(stage: int, accumulate: int) -> None:
    trainer, ours, alone, reference = fit_both(stage, EditsGradients, max_steps=4, accumulate_grad_batches=accumulate)
    assert float(weights(alone, reference)["spare"][0]) != 1.0
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


class ReadsBetween(Regressor):
    """Looks at gradients between the micro-batches of an accumulation."""

    def on_after_backward(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ZeROStrategy):
            with strategy.gathered(self, gradients=True):
                pass


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_looking_between_micro_batches_changes_nothing(stage: int) -> None:
    trainer, ours, alone, reference = fit_both(stage, ReadsBetween, max_steps=3, accumulate_grad_batches=3)
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


# Writes that leave no trace ---------------------------------------------------------------------------------------


class Halves(L.LightningModule):
    """Float32 model that scales a weight through ``.data`` in one hook, with an optimizer that does nothing."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.where = where
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def halve(self, where: str) -> None:
        if where == self.where:
            self.layers[1].weight.data.mul_(0.5)  # type: ignore[union-attr,operator]

    def training_step(self, batch: Any, index: int) -> Tensor:
        x = batch[0].float()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.halve("training_step")
        return x.pow(2).mean()

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.training_step(batch, index)

    def on_train_batch_end(self, *_: Any) -> None:
        self.halve("on_train_batch_end")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.halve("on_before_optimizer_step")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@ranks(2)
@pytest.mark.filterwarnings("ignore:.*is read outside the forward")
@pytest.mark.parametrize("precision", ("32-true", "bf16-mixed"))
@pytest.mark.parametrize(
    ("stage", "where"),
    [(s, w) for s in (0, 1, 2) for w in ("training_step", "on_train_batch_end", "on_before_optimizer_step")]
    + [(3, "training_step")],
)
def test_writes_through_data_count(stage: int, where: str, precision: str) -> None:
    module = Halves(where)
    before = module.layers[1].weight.detach().clone()  # type: ignore[union-attr,operator]
    trainer = trainer_on_ranks(stage, max_steps=3, precision=precision)
    trainer.fit(module, loader())
    scale = weights(trainer, module)["layers.1.weight"] / before
    assert torch.allclose(scale, torch.full_like(scale, 0.125), rtol=2e-2)


class Constrained(nn.Linear):
    """A layer that keeps its own weights small, in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_layers_that_constrain_themselves(stage: int) -> None:
    def make() -> Regressor:
        module = Regressor()
        for block in module.blocks:
            block.up = Constrained(8, 16).double()  # type: ignore[union-attr]
        return module

    def seeded() -> Regressor:
        torch.manual_seed(1)
        return make()

    trainer, ours, alone, reference = fit_both(stage, seeded, max_steps=3)
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mixed", (False, True))
def test_writes_into_what_the_optimizer_holds(stage: int, mixed: bool) -> None:
    """Clamping by way of the optimizer's groups reaches what the next forward sees, on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    engine = ZeroEngine(
        model,
        Mesh.from_world(Layout(dp=world_size())),
        stage=stage,
        compute_dtype=torch.bfloat16 if mixed else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine.adopt(optimizer)
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.fill_(0.25)
    with engine.step("eval"):
        out = model(torch.ones(1, 6))
    assert torch.equal(out.float(), torch.full((1, 6), 6 * 0.25 * 1.75 + 0.25))


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_loaded_values_are_not_taken_for_a_write(stage: int, tmp_path: Path) -> None:
    """After an exception in the middle of a step units may be gathered still; loading must win over them."""

    class Fails(Regressor):
        fails = False

        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            if self.fails:
                raise KeyError("on purpose")
            return loss

    trainer = trainer_on_ranks(stage, max_epochs=1, limit_train_batches=1)
    module = Fails()
    trainer.fit(module, loader())
    first = weights(trainer, module)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    module.fails, trainer.fit_loop.max_epochs = True, 3
    with pytest.raises(KeyError):
        trainer.fit(module, loader())
    trainer.validate(module, loader(), ckpt_path=tmp_path / "first.ckpt", verbose=False)
    assert_same_weights(weights(trainer, module), first, rel=0.0)
