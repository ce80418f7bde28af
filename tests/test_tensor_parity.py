"""The law of parity under tensor parallelism: models as they come equal one process in loss and in every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dist.comm import Mesh
from lightning_dist.comm.parts import part_of
from lightning_dist.core.layout import Layout
from lightning_dist.core.shard import cut_of
from lightning_dist.params.questions import without_answers
from lightning_dist.tensor.cut import cut_module
from tests.harness import ranks, world_size
from tests.tp.models import CASES, AllInFloat64

EXACT = 1e-10


def assert_same_gradients(reference: torch.nn.Module, module: torch.nn.Module, rank: int) -> int:
    """Every gradient is this rank's part of the reference's; returns how many were compared."""
    theirs = dict(reference.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None)
    compared = 0
    for name, parameter in module.named_parameters():
        want, cut = theirs[name].grad, cut_of(parameter)
        got = parameter.grad
        assert (want is None) == (got is None), name
        if want is None or got is None:
            continue
        want = want if cut is None else part_of(want, cut.dim, cut.split, rank)
        got = without_answers(got)
        assert got.shape == want.shape, name
        if want.numel():
            assert float((got - want).abs().max()) <= EXACT * largest, name
        compared += 1
    return compared


@ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_one_process(name: str, sequence_parallel: bool) -> None:
    case = CASES[name]
    reference, module = case.build(), case.build()
    mesh = Mesh.from_world(Layout(tp=world_size()))
    report = cut_module(module, mesh.tp, plan=case.plan, sequence_parallel=sequence_parallel)
    assert report.cut
    for step in range(2):
        batch = case.batch(step)
        reference.zero_grad()
        module.zero_grad()
        with AllInFloat64():
            want, got = case.loss(reference, batch), case.loss(module, batch)
        want.backward()
        with mesh.ledger.measure() as sent:
            got.backward()
        torch.testing.assert_close(got.detach(), want.detach(), rtol=EXACT, atol=0)
        assert type(got) is Tensor
        assert assert_same_gradients(reference, module, mesh.tp.rank) >= 8
        assert sent.total(axis="tp", purpose="activations") > 0


def test_the_sweep_is_as_wide_as_it_says() -> None:
    assert len(CASES) == 22
