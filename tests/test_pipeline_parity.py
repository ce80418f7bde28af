"""The law of parity under a pipeline: models as they come equal one process in loss and in every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist.comm import Mesh
from lightning_dist.core.layout import Layout
from lightning_dist.pipeline.absent import AbsentParameter
from lightning_dist.pipeline.engine import PipelineEngine
from tests.harness import ranks, world_size
from tests.pp.models import CASES
from tests.tp.models import AllInFloat64, Case

EXACT = 1e-10
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv")
MICRO_BATCHES = (1, 2, 4, 7)


def assert_same_gradients(reference: nn.Module, module: nn.Module) -> int:
    """Every gradient of this rank is the reference's; returns how many were compared."""
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in theirs.values() if gradient is not None)
    compared = 0
    for name, parameter in module.named_parameters():
        if isinstance(parameter, AbsentParameter):
            assert parameter.grad is None
            continue
        want, got = theirs[name], parameter.grad
        assert (want is None) == (got is None), name
        if want is not None and got is not None:
            assert float((got - want).abs().max()) <= EXACT * largest, name
            compared += 1
    return compared


def check(case: Case, mesh: Mesh, schedule: str, micro_batches: int, *, accumulate: int, recompute: bool) -> int:
    """Two optimizer steps' gradients; the number that was compared."""
    reference, module = case.build(), case.build()
    engine = PipelineEngine(module, mesh, num_micro_batches=micro_batches, schedule=schedule, recompute=recompute)
    compared = 0
    for step in range(2):
        reference.zero_grad()
        module.zero_grad()
        for number in range(accumulate):
            batch = case.batch(2 * step + number)
            with AllInFloat64():
                want = case.loss(reference, batch) / accumulate
                got = engine.forward_backward(lambda part: case.loss(module, part), batch, scale=1 / accumulate)
            want.backward()
            torch.testing.assert_close(got.returned / accumulate, want.detach(), rtol=EXACT, atol=0)
        compared += assert_same_gradients(reference, module)
    return compared


def sweep(name: str, mesh: Mesh, micro_batches: tuple[int, ...]) -> int:
    """All schedules with some numbers of micro-batches; accumulation and recompute take turns."""
    swept = 0
    for s, schedule in enumerate(SCHEDULES):
        for number in micro_batches:
            m = MICRO_BATCHES.index(number)
            turns = {"accumulate": 1 + (s + m) % 2, "recompute": (s + m // 2) % 2 == 1}
            assert check(CASES[name], mesh, schedule, number, **turns) >= 4
            swept += 1
    return swept


@ranks(2, 4)
@pytest.mark.parametrize("name", [name for name in CASES if name != "t5"])
def test_loss_and_gradients_equal_one_process(name: str) -> None:
    """All schedules; the number of micro-batches goes on with the model, the schedule and the world."""
    mesh = Mesh.from_world(Layout(pp=world_size()))
    swept = 0
    for s, schedule in enumerate(SCHEDULES):
        turn = list(CASES).index(name) + s + world_size() // 2
        number = MICRO_BATCHES[turn % 4]
        turns = {"accumulate": 1 + turn // 4 % 2, "recompute": (turn // 2) % 2 == 1}
        assert check(CASES[name], mesh, schedule, number, **turns) >= 4
        swept += 1
    assert swept == len(SCHEDULES)


@ranks(2, 4)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_what_leaves_the_chain_sideways_is_carried_along(schedule: str) -> None:
    """T5: three tensors travel with the hidden state. Its whole sweep is slow: its layers cannot be skipped."""
    mesh = Mesh.from_world(Layout(pp=world_size()))
    assert check(CASES["t5"], mesh, schedule, 2, accumulate=1, recompute=False) > 50


@pytest.mark.slow
@ranks(2, 4)
@pytest.mark.parametrize("name", CASES)
def test_every_number_of_micro_batches_on_every_number_of_ranks(name: str) -> None:
    mesh = Mesh.from_world(Layout(pp=world_size()))
    assert sweep(name, mesh, MICRO_BATCHES) == len(SCHEDULES) * len(MICRO_BATCHES) == 20


def test_the_sweep_is_as_wide_as_it_says() -> None:
    assert len(CASES) == 14
