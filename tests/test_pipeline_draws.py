"""Random numbers under `Trainer(strategy="pp")`: the same draw has the same numbers on every stage that makes it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dist import PipelineParallelStrategy
from lightning_dist.comm import Mesh
from lightning_dist.core.errors import PeerLostError, UnsupportedModelError
from lightning_dist.core.layout import Layout
from lightning_dist.pipeline.engine import PipelineEngine
from tests.harness import rank, ranks
from tests.lit import trainer_on_ranks
from tests.pp.lit import Small, everywhere, points

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zbv": {"schedule": "zbv"},
    "interleaved": {"schedule": "interleaved", "virtual_stages": 2},
    "recompute": {"recompute": "full"},
}


class Carries(nn.Module):
    """A layer that hands something on beside its output, and draws, each time another number of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        random.random()
        np.random.rand(2)
        return x + F.dropout(self.linear(x), 0.5), carried * 1.0


class Draws(Small):
    """Draws everything that can be drawn, ahead of the layers; stage 0 sends its numbers through the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))  # the other stages do not compute it
        self.same = nn.Linear(9, 9, bias=False)
        nn.init.eye_(self.same.weight.requires_grad_(False))
        self.blocks = nn.ModuleList([Carries() for _ in range(8)])
        self.own = torch.Generator().manual_seed(5)
        self.double()
        self.gaps: list[float] = []
        self.drawn: list[Tensor] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        x = F.dropout(self.first(batch[0]), 0.3)  # of a fake, on the other stages
        x = x + torch.randn_like(x)  # of a fake, too
        plain = torch.tensor([random.random(), np.random.rand()], dtype=torch.float64).expand(len(x), 2)
        noise = torch.cat([torch.randn_like(batch[0]), plain, torch.rand(len(x), 1, generator=self.own).double()], 1)
        carried = self.same(noise)
        for block in self.blocks:
            x, carried = block(x, carried)
        self.gaps.append(float((carried - noise).detach().abs().max()))
        self.drawn.append(noise[0])
        return F.mse_loss(self.head(x), noise[:, :3])


@ranks(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_drawn_ahead_of_the_layers_is_the_same_behind_them(name: str) -> None:
    random.seed(rank())
    np.random.seed(rank())
    module = Draws()
    torch.manual_seed(1)
    trainer = trainer_on_ranks(
        PipelineParallelStrategy(num_microbatches=4, place={"same": "first"}, **SCHEDULES[name]), max_epochs=1
    )
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    trainer.fit(module, points(16, 8))
    assert module.gaps == [0.0] * 8
    rows = torch.stack(module.drawn)
    assert [len(column.unique()) for column in rows.T] == [8] * 9, "micro-batches or steps have numbers in common"
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[union-attr]
    states = everywhere(trainer, [torch.get_rng_state().tolist(), module.own.get_state().tolist()])
    assert states[0] == states[1]


class Masks(nn.Module):
    """Layers with dropout between two linears; keeps what each layer's input and output was, where it is computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.25)) for _ in range(8)])
        self.head = nn.Linear(64, 1)
        self.masks: dict[int, list[Tensor]] = {}
        for number, block in enumerate(self.blocks):
            block.register_forward_hook(lambda _, __, output, n=number: self._keep(n, output))  # type: ignore[misc]
        self.double()

    def _keep(self, number: int, output: Tensor) -> None:
        if type(output) is Tensor:
            self.masks.setdefault(number, []).append(output.detach() == 0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y.square().mean()


def masks(mesh: Mesh, **options: Any) -> tuple[dict[int, list[Tensor]], dict[str, Tensor]]:
    """Of every layer and micro-batch, wherever it was computed; and the gradients that came of them."""
    module = Masks()
    engine = PipelineEngine(module, mesh, num_micro_batches=2, **options)
    torch.manual_seed(1)
    engine.forward_backward(module, torch.ones(16, 64, dtype=torch.float64))
    grads = {name: p.grad for name, p in module.named_parameters() if engine.is_here(p)}
    whole: Any = mesh.rollcall.exchange((module.masks, grads))
    return {k: v for said in whole for k, v in said[0].items()}, {k: v for said in whole for k, v in said[1].items()}


@ranks(2)
def test_dropout_in_the_layers_is_a_proper_one_and_the_same_however_they_are_divided() -> None:
    mesh = Mesh.from_world(Layout(pp=2))
    want, grads = masks(mesh)
    every = [mask for number in range(8) for mask in want[number]]
    assert len(every) == 16
    for number, mask in enumerate(every):
        assert abs(float(mask.double().mean()) - 0.25) < 0.08
        assert not any(torch.equal(mask, other) for other in every[:number])
    for options in ({"split": [5, 3]}, {"schedule": "zbv"}, {"recompute": True}):
        got, theirs = masks(mesh, **options)
        for number in range(8):
            for mask, other in zip(got[number][:2], want[number], strict=True):
                assert torch.equal(mask, other), (options, number)
        for name, grad in grads.items():
            torch.testing.assert_close(theirs[name], grad, rtol=1e-9, atol=1e-12, msg=f"{options} {name}")


class Counts(Small):
    """Draws, of what it has computed, numbers that are rejected until they fit."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.poisson(self.first(x).abs())
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


@ranks(2)
def test_a_draw_whose_length_depends_on_values_is_refused() -> None:
    trainer = trainer_on_ranks(PipelineParallelStrategy(num_microbatches=2), max_steps=1)
    with pytest.raises((UnsupportedModelError, PeerLostError), match="how many random numbers"):
        trainer.fit(Counts(), points())
