"""A step under `torch.autocast` of the user's own: dtypes as in one process, numbers as near as bfloat16 is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dist.comm import Mesh
from lightning_dist.comm.parts import part_of
from lightning_dist.core.layout import Layout
from lightning_dist.core.shard import cut_of
from lightning_dist.core.split import even_split
from lightning_dist.params.questions import without_answers
from lightning_dist.tensor.cut import cut_module
from lightning_dist.tensor.parameter import cut_in_place
from tests.harness import ranks, world_size
from tests.tp.models import CASES

NEAR = 0.05  # of a norm; one rounding to bfloat16 is 0.004 of a number


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("name", ["hand_written", "llama_eager", "gpt2", "encoder"])
def test_a_step_under_autocast_is_near_one_process(name: str, sequence_parallel: bool) -> None:
    """Linears with and without biases, Conv1D, embeddings, products, attention of both kinds, the loss."""
    case = CASES[name]
    reference, module = case.build().float(), case.build().float()
    mesh = Mesh.from_world(Layout(tp=world_size()))
    cut_module(module, mesh.tp, plan=case.plan, sequence_parallel=sequence_parallel)
    batch = {k: v.float() if v.is_floating_point() else v for k, v in case.batch().items()}
    losses = []
    for model in (reference, module):
        with torch.autocast("cpu", torch.bfloat16):
            loss = case.loss(model, batch)
        loss.backward()
        losses.append(loss.detach())
    assert losses[0].dtype is losses[1].dtype
    assert float((losses[1] - losses[0]).abs()) <= 0.01 * float(losses[0])
    theirs = dict(reference.named_parameters())
    largest = max(float(p.grad.norm()) for p in theirs.values() if p.grad is not None)
    for parameter_name, parameter in module.named_parameters():
        want, got, cut = theirs[parameter_name].grad, parameter.grad, cut_of(parameter)
        assert (want is None) == (got is None), parameter_name
        if want is not None and got is not None:
            want = want if cut is None else part_of(want, cut.dim, cut.split, mesh.tp.rank)
            assert got.dtype is want.dtype, parameter_name
            off = float((without_answers(got) - want).norm())
            assert off <= NEAR * max(float(want.norm()), 0.1 * largest), (parameter_name, off, float(want.norm()))


CALLS: dict[str, Callable[[nn.Parameter, Tensor, Tensor], Tensor]] = {
    "linear": lambda p, x, b: F.linear(x, p),
    "linear_with_bias": lambda p, x, b: F.linear(x, p, b),
    "addmm": lambda p, x, b: torch.addmm(b, x, p),
    "matmul": lambda p, x, b: x @ p,
    "embedding": lambda p, x, b: F.embedding(torch.tensor([0, 3, 7]), p),
    "of_float64": lambda p, x, b: F.linear(x.double(), p.double(), b.double()),
    "loss": lambda p, x, b: F.cross_entropy(F.linear(x, p), torch.tensor([1, 0, 7])),
    "loss_by_token": lambda p, x, b: F.cross_entropy(F.linear(x, p), torch.tensor([1, 0, 7]), reduction="none"),
}


@ranks(2)
def test_dtypes_under_autocast_are_those_of_one_process() -> None:
    axis = Mesh.from_world(Layout(tp=world_size())).tp
    for name, call in CALLS.items():
        for dim in (0, 1):
            torch.manual_seed(1)
            values, features, bias = torch.randn(8, 8), torch.randn(3, 8), torch.randn(8)
            found = []
            for cut in (False, True):
                parameter, x = nn.Parameter(values.clone()), features.clone().requires_grad_()
                if cut:
                    cut_in_place(parameter, axis, dim, even_split(8, axis.size))
                with torch.autocast("cpu", torch.bfloat16):
                    out = call(parameter, x, bias)
                out.double().pow(2).sum().backward()
                found.append((out.dtype, tuple(out.shape), None if x.grad is None else (x.grad.dtype, x.grad)))
                assert parameter.grad is not None
                assert parameter.grad.dtype is torch.float32
            (dtype, shape, by_x), mine = found[0], found[1]
            assert mine[:2] == (dtype, shape), (name, dim)
            if by_x is not None:
                assert mine[2] is not None
                assert mine[2][0] is by_x[0]
                assert float((mine[2][1] - by_x[1]).norm()) <= NEAR * float(by_x[1].norm()), (name, dim)
