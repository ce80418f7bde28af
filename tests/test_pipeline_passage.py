"""How a step passes the layers of other stages: what it sees there, changes there, and must not take for values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lightning_dist import PipelineParallelStrategy
from lightning_dist.core.errors import LightningDistError
from tests.harness import ranks
from tests.lit import trainer_alone, trainer_on_ranks
from tests.pp.lit import Lit, Small, everywhere, fit_both, in_order, points, texts
from tests.tp.lit import assert_same


class Plain(Small):
    """Layers of a kind, called one after the other."""

    kind: ClassVar[Callable[[int], nn.Module]]

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
        self.blocks = nn.ModuleList([type(self).kind(index) for index in range(6)])
        self.double()

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.through(self.first(x)))
        return y


class Block(nn.Module):
    """One linear map; `index` is the layer's number."""

    def __init__(self, index: int, **known: Any) -> None:
        super().__init__()
        self.linear, self.index, self.known = nn.Linear(6, 6), index, known

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.linear(x))


class WritesToDict(Block):
    def forward(self, state: Any) -> Any:
        state["x"] = super().forward(state["x"])
        state["sum"] = state.get("sum", 0) + state["x"].mean(1)


class InDict(Plain):
    kind = WritesToDict

    def through(self, x: Tensor) -> Tensor:
        state = {"x": x}
        for block in self.blocks:
            block(state)
        return state["x"] + state["sum"][:, None]  # type: ignore[no-any-return]


class WritesToList(Block):
    def forward(self, state: Any) -> Any:
        state[0] = super().forward(state[0])
        state.append(state[0].mean(1))
        return state[0]


class InList(Plain):
    kind = WritesToList

    def through(self, x: Tensor) -> Tensor:
        state = [x]
        for block in self.blocks:
            block(state)
        return state[0] + sum(state[1:])[:, None]  # type: ignore[index, return-value, unused-ignore]


class Stops(Block):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y.detach() if self.known["stop"] else y


class StopsByFlag(Plain):
    kind = staticmethod(lambda index: Stops(index, stop=index == 2))


class LearnsLate(Plain):
    kind = Block

    def through(self, x: Tensor) -> Tensor:
        x = x.detach()
        for index, block in enumerate(self.blocks):
            with torch.set_grad_enabled(index >= 2 and torch.is_grad_enabled()):
                x = block(x)
        return x


class InPlace(Plain):
    """A flat list, as in VGG: a stage begins with a layer that writes to what came."""

    kind = staticmethod(lambda index: nn.Linear(6, 6) if index % 2 == 0 else nn.ReLU(inplace=True))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Any:
        inner = nn.Sequential(self.linear, nn.Tanh(), self.linear)
        return x + checkpoint(inner, x, use_reentrant=self.index % 2 == 1)


class ChecksInside(Plain):
    kind = Checkpointed


class Named(Block):
    def __init_subclass__(cls, *, name: str) -> None:
        super().__init_subclass__()


class Particular(Named, name="particular"):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if type(self) is Particular else x


class OfParticularClass(Plain):
    kind = Particular


class CollectsInLoss(Plain):
    """What the layers of the last stage left with a hook, and what came to its first one."""

    kind = Block

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: self.states.append(output))

    def loss(self, batch: Any) -> Tensor:
        self.states.clear()
        loss = super().loss(batch) + 0.1 * self.states[self.taken].square().mean()
        self.log("states", float(len(self.states)), reduce_fx="max")
        self.states.clear()
        return loss

    taken = 2  # what the first layer of the second stage is called with


EQUAL: dict[str, tuple[type[Plain], dict[str, Any]]] = {
    "a dict that layers change": (InDict, {"schedule": "zbv"}),
    "a list that layers change": (InList, {}),
    "a flag of one layer stops the gradient": (StopsByFlag, {}),
    "no gradients for the first layers": (LearnsLate, {"schedule": "zb_h1"}),
    "layers that write in place": (InPlace, {"split": [3, 3]}),
    "checkpoints inside, weights later": (ChecksInside, {"schedule": "zb_h1"}),
    "checkpoints in checkpoints, weights later": (ChecksInside, {"schedule": "zbv", "recompute": "full"}),
    "a class that hears of its subclasses": (OfParticularClass, {}),
    "hooks": (CollectsInLoss, {}),
}


@ranks(2)
@pytest.mark.parametrize("what", EQUAL)
def test_equals_one_process(what: str) -> None:
    make, options = EQUAL[what]
    module, alone = make(), make()
    ours = trainer_on_ranks(PipelineParallelStrategy(num_microbatches=2, **options), max_epochs=1)
    theirs = trainer_alone(max_epochs=1)
    data = points(16, 8)
    ours.fit(module, data)
    theirs.fit(alone, data)
    assert_same(ours, module, alone)
    for said in everywhere(ours, {key: float(value) for key, value in ours.callback_metrics.items()}):
        assert said == pytest.approx({key: float(value) for key, value in theirs.callback_metrics.items()}, rel=1e-9)


class Strides(L.LightningModule):
    """Convolutions that differ in nothing but a stride."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList([nn.Conv2d(3, 3, 3, padding=1, stride=stride) for stride in (1, 2, 1, 2)])
        self.double()

    def training_step(self, batch: Any, index: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@ranks(2)
def test_layers_that_differ_in_a_plain_attribute_are_not_alike() -> None:
    pictures = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data = in_order(TensorDataset(pictures), 4)
    module, alone = Strides(), Strides()
    ours = trainer_on_ranks(PipelineParallelStrategy(num_microbatches=2, split=[3, 1]), max_epochs=1)
    ours.fit(module, data)
    trainer_alone(max_epochs=1).fit(alone, data)
    assert_same(ours, module, alone)


class StopsByNumber(Block):
    def __init__(self, index: int) -> None:
        super().__init__(0)
        self.layer_idx = index

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y.detach() if self.layer_idx == 2 else y


class StopsByItsNumber(Plain):
    kind = StopsByNumber


class Measures(Plain):
    """Hooks that look at values."""

    kind = Block

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        for block in self.blocks:
            block.linear.register_forward_hook(self.measure)  # type: ignore[operator, union-attr]

    def measure(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.norms.append(output.norm().item())


class TakesTooEarly(CollectsInLoss):
    taken = 1


class ReturnsStates(CollectsInLoss):
    def training_step(self, batch: Any, index: int) -> Any:
        self.states.clear()
        out = self(batch[0])
        states, self.states = self.states, []
        return {"loss": nn.functional.mse_loss(out, batch[1]), "states": states}


class KeepsStates(CollectsInLoss):
    def loss(self, batch: Any) -> Tensor:
        self.states.clear()
        return Small.loss(self, batch)


class LogsTooEarly(Plain):
    kind = Block

    def forward(self, x: Tensor) -> Tensor:
        self.log("first", self.first(x).mean())
        return super().forward(x)


def checkpointed(reentrant: bool) -> type[Plain]:
    class Outside(Plain):
        kind = Block

        def through(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    return Outside


REFUSED: dict[str, tuple[type[Plain], tuple[str, ...]]] = {
    "gradient stopped by number": (StopsByItsNumber, ("blocks.3", "no gradient", "number of the layer")),
    "a hook that reads values": (Measures, ("Measures.measure", "blocks.0", "reads values")),
    "a state of another stage": (TakesTooEarly, ("blocks.1 is used after the layers",)),
    "states that are returned": (ReturnsStates, ("blocks.0", "['states'][0]", "has no values")),
    "states that are kept": (KeepsStates, ("self.states", "blocks.0", "has no values")),
    "a fake that is logged": (LogsTooEarly, ('"first"', "has no values")),
    "reentrant checkpoints": (checkpointed(True), ("blocks.0", "checkpoint", 'recompute="full"')),
    "checkpoints": (checkpointed(False), ("blocks.0", "checkpoint", 'recompute="full"')),
}


@ranks(2)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_is_refused(what: str) -> None:
    make, words = REFUSED[what]
    trainer = trainer_on_ranks(PipelineParallelStrategy(num_microbatches=2, split=[3, 3]), max_epochs=1)
    with pytest.raises(LightningDistError) as refusal:
        trainer.fit(make(), points(8, 8))
    for word in words:
        assert word in str(refusal.value), str(refusal.value)


class WithStates(Lit):
    """Hugging Face's states of all layers, of which the last stage has its own."""

    def predict_step(self, batch: Any, index: int) -> Any:
        states = self.model(batch["input_ids"], output_hidden_states=True).hidden_states
        return states[self.taken].mean((1, 2))

    taken = -2


class WithAllStates(WithStates):
    def predict_step(self, batch: Any, index: int) -> Any:
        return {"h": self.model(batch["input_ids"], output_hidden_states=True).hidden_states}


@ranks(2)
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_hidden_states_of_hugging_face(model: str) -> None:
    ours = trainer_on_ranks(PipelineParallelStrategy(num_microbatches=2)).predict(WithStates(model), texts())
    theirs = trainer_alone().predict(WithStates(model), texts())
    torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]
    with pytest.raises(LightningDistError, match=r"(embed_tokens|layers\.0) .*'h'.*has no values"):
        trainer_on_ranks(PipelineParallelStrategy(num_microbatches=2)).predict(WithAllStates(model), texts())


class Saving(Lit):
    """Gradient checkpointing as Hugging Face switches it on; without the float64 that a second forward lacks."""

    def __init__(self) -> None:
        super().__init__("gpt2", lambda module: torch.optim.SGD(module.parameters(), lr=0.5))
        self.model.gradient_checkpointing_enable()

    def loss(self, batch: Any) -> Tensor:
        return self.case.loss(self.model, batch)


@ranks(2)
def test_gradient_checkpointing_of_hugging_face() -> None:
    strategy = PipelineParallelStrategy(num_microbatches=2, schedule="zb_h1")
    ours, _, theirs, _ = fit_both(Saving, strategy, max_epochs=1)
    for said in everywhere(ours, float(ours.callback_metrics["val"])):
        assert said == pytest.approx(float(theirs.callback_metrics["val"]), rel=1e-5)
