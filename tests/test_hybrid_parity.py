"""The law of parity with several kinds of parallelism at once: loss, gradients and weights equal one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_dist.comm import Mesh
from lightning_dist.core.layout import Layout
from lightning_dist.engine import Plan, grad_norm, parallelize
from tests.harness import ranks
from tests.pp.models import CASES
from tests.tp.models import AllInFloat64, Case

EXACT = 1e-10
MODELS = ("llama", "llama_tied", "gpt2")
OF_FOUR = {
    "tp2_pp2": (Layout(tp=2, pp=2), 0),
    **{f"tp2_zero{stage}": (Layout(tp=2, dp=2), stage) for stage in (1, 2, 3)},
    **{f"pp2_zero{stage}": (Layout(pp=2, dp=2), stage) for stage in (1, 2, 3)},
}
OF_EIGHT = {f"tp2_pp2_zero{stage}": (Layout(tp=2, pp=2, dp=2), stage) for stage in (1, 2, 3)}


VARIANTS = {
    "sequence": ("llama", {"sequence_parallel": True}),
    "sequence_tied": ("llama_tied", {"sequence_parallel": True, "schedule": "interleaved"}),
    "sequence_gpt2": ("gpt2", {"sequence_parallel": True, "schedule": "zbv"}),
    "halves": ("llama_tied", {"schedule": "zb_h1"}),
    "recompute": ("gpt2", {"recompute": True, "schedule": "gpipe"}),
    "recompute_sequence": ("llama", {"recompute": True, "sequence_parallel": True}),
    "experts": ("mixtral", {"schedule": "interleaved"}),
    "gemma2": ("gemma2", {}),
    "bert": ("bert", {}),
    "vit": ("vit", {}),
    "encoder": ("encoder", {"schedule": "gpipe"}),
    "decoder": ("decoder", {"sequence_parallel": True}),
    "t5": ("t5", {}),
}


def close(got: torch.Tensor, want: torch.Tensor, largest: float, name: str) -> None:
    assert got.shape == want.shape, name
    assert float((got - want).abs().max()) <= EXACT * largest, name


def check(case: Case, layout: Layout, stage: int, *, accumulate: int = 1, **options: object) -> int:
    """Two optimizer steps; the number of gradients that were compared."""
    mesh = Mesh.from_world(layout)
    reference, module = case.build(), case.build()
    plan = Plan(layout, zero=stage, tp_plan=case.plan, num_micro_batches=4, **options)  # type: ignore[arg-type]
    parallel = parallelize(module, plan, mesh)
    make = lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)  # noqa: E731
    optimizer, theirs = make(module), make(reference)
    parallel.zero.adopt(optimizer)
    compared = 0
    for step in range(2):
        optimizer.zero_grad()
        theirs.zero_grad()
        for part in range(accumulate):
            batches = [case.batch(100 * step + 10 * part + replica) for replica in range(layout.dp)]
            with AllInFloat64():
                got = parallel.forward_backward(
                    lambda batch: case.loss(module, batch), batches[mesh.dp.rank], sync=part == accumulate - 1
                )
                wanted = [case.loss(reference, batch) for batch in batches]
            torch.stack(wanted).mean().backward()
            torch.testing.assert_close(got, wanted[mesh.dp.rank].detach(), rtol=EXACT, atol=0)
        gradients = {name: p.grad for name, p in reference.named_parameters()}
        largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
        norm = torch.cat([g.flatten() for g in gradients.values() if g is not None]).norm()
        assert float(grad_norm(parallel.zero)) == pytest.approx(float(norm), rel=1e-12)
        with parallel.zero.gathered(module, gradients=True):
            for name, parameter in module.named_parameters():
                want, got = gradients[name], parameter.grad
                assert (want is None) == (got is None), name
                if want is not None:
                    close(got, want, largest, name)
                    compared += 1
        optimizer.step()
        theirs.step()
    largest = max(float(want.detach().abs().max()) for want in reference.parameters())
    with parallel.zero.gathered(module):
        for (name, parameter), want in zip(module.named_parameters(), reference.parameters(), strict=True):
            close(parameter.detach(), want.detach(), largest, name)
    parallel.remove()
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    with AllInFloat64():
        batch = case.batch(7)
        torch.testing.assert_close(
            case.loss(copy.deepcopy(module), batch), case.loss(reference, batch), rtol=EXACT, atol=0
        )
    return compared


@ranks(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", OF_FOUR)
def test_four_ranks_equal_one_process(kind: str, name: str) -> None:
    layout, stage = OF_FOUR[kind]
    assert check(CASES[name], layout, stage) > 20


@ranks(4)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_one_process(name: str) -> None:
    """Schedules, sequence parallelism, recompute and other models, in two stages of two ranks, accumulating twice."""
    model, options = VARIANTS[name]
    assert check(CASES[model], Layout(tp=2, pp=2), 0, accumulate=2, **options) > 20


@ranks(4)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_over_sharded_replicas(stage: int) -> None:
    assert check(CASES["gpt2"], Layout(pp=2, dp=2), stage, accumulate=3) > 20
    assert check(CASES["llama"], Layout(tp=2, dp=2), stage, accumulate=3, sequence_parallel=True) > 20


@pytest.mark.slow
@ranks(8)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", OF_EIGHT)
def test_eight_ranks_equal_one_process(kind: str, name: str) -> None:
    layout, stage = OF_EIGHT[kind]
    assert check(CASES[name], layout, stage, sequence_parallel=name != "gpt2") > 20


def test_the_sweep_is_as_wide_as_it_says() -> None:
    assert (len(OF_FOUR), len(OF_EIGHT), len(MODELS), len(VARIANTS)) == (7, 3, 3, 13)
