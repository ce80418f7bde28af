"""Memory and traffic as numbers: the closed forms of the ZeRO table, to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_dist.comm import Mesh, fake_world
from lightning_dist.core.layout import Layout
from lightning_dist.core.stages import STAGES, Placement
from lightning_dist.engine import memory_line, step_bytes
from lightning_dist.zero import ZeroEngine
from lightning_dist.zero.units import ROOT
from tests.harness import ranks, world_size
from tests.zoo import ZOO, build, global_batch, local_batch


class Stack(nn.Module):
    """Four equal layers of Ψ = 4 * (64 * 64 + 64) parameters, nothing else: no root unit, no padding for N = 2, 4."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


PSI = 4 * (64 * 64 + 64)


def engine_of(
    stage: int, *, dtype: torch.dtype = torch.float32, compute: torch.dtype | None = None
) -> tuple[ZeroEngine, torch.optim.Optimizer]:
    torch.manual_seed(0)
    engine = ZeroEngine(Stack().to(dtype), Mesh.from_world(Layout(dp=world_size())), stage=stage, compute_dtype=compute)
    optimizer = torch.optim.AdamW(engine.module.parameters())
    engine.adopt(optimizer)
    return engine, optimizer


def one_step(engine: ZeroEngine, optimizer: torch.optim.Optimizer, micro_batches: int = 1) -> None:
    optimizer.zero_grad()
    for index in range(micro_batches):
        with engine.step():
            inputs = torch.ones(2, 64, dtype=engine.groups[0].compute_dtype)
            engine.backward(engine.module(inputs).float().pow(2).mean(), sync=index == micro_batches - 1)
    optimizer.step()


@ranks(2, 4)
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_sent_per_step_equal_the_paper(stage: int) -> None:
    """2Ψ, 2Ψ, 2Ψ, 3Ψ times (N-1)/N times the item size, in every step, the first included."""
    engine, optimizer = engine_of(stage)
    n = world_size()
    for _ in range(3):
        with engine.mesh.ledger.measure() as sent:
            one_step(engine, optimizer)
        data = sent.total(purpose="parameters") + sent.total(purpose="gradients")
        assert data == (3 if stage == 3 else 2) * PSI * 4 * (n - 1) // n
        assert data == step_bytes(engine)
        rest = sent.total() - data
        assert rest == sent.total(purpose="rollcall") < 16 * (n - 1) * 40  # announcements only


@ranks(2, 4)
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_kept_equal_the_closed_form(stage: int) -> None:
    """While micro-batches accumulate, fp32: parameters Ψ or Ψ/N, gradients Ψ or Ψ/N, moments 2Ψ or 2Ψ/N, times 4."""
    engine, optimizer = engine_of(stage)
    one_step(engine, optimizer)
    optimizer.zero_grad()
    with engine.step():
        engine.backward(engine.module(torch.ones(2, 64)).pow(2).mean(), sync=False)
    n, row = world_size(), STAGES[stage]

    def share(placement: Placement) -> int:
        return PSI // n if placement is Placement.SHARD else PSI

    kept = [group.local_bytes() for group in engine.groups]
    assert sum(k["parameters"] + k["master"] for k in kept) == 4 * share(row.parameter)
    held = sum(g.gradient.numel() for g in engine.groups if g.gradient is not None)
    if row.gradient is Placement.SHARD:
        held += sum(g.reduced.numel() for g in engine.groups if g.reduced is not None)
    assert 4 * held == 4 * share(row.gradient)
    moments = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    assert sum(v.numel() * v.element_size() for v in moments) == 8 * share(row.optimizer)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_mixed_precision_bytes_equal_the_closed_form(stage: int) -> None:
    """K = 12 (fp32 master and moments): 2Ψ + 12Ψ/N at rest for stages 1 and 2, 12Ψ/N for stage 3, 14Ψ for stage 0."""
    engine, optimizer = engine_of(stage, compute=torch.bfloat16)
    one_step(engine, optimizer)
    n = world_size()
    kept = sum(g.local_bytes()["parameters"] + g.local_bytes()["master"] for g in engine.groups)
    kept += sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values() if v.ndim)
    assert kept == {0: 14 * PSI, 1: 2 * PSI + 12 * PSI // n, 2: 2 * PSI + 12 * PSI // n, 3: 12 * PSI // n}[stage]


@ranks(2)
def test_bfloat16_halves_the_traffic_and_keeps_the_sum() -> None:
    """Gradients travel as computed and are added in float32: the same numbers as converting first."""
    engine, optimizer = engine_of(2, compute=torch.bfloat16)
    with engine.mesh.ledger.measure() as sent:
        one_step(engine, optimizer)
    assert sent.total(purpose="gradients") == PSI * 2 // 2
    flat = torch.randn(64).bfloat16() * (1 + engine.mesh.rank)
    everyone = [torch.tensor(t) for t in engine.mesh.rollcall.exchange(flat.float().tolist())]
    out = torch.empty(32)
    engine.mesh.dp.reduce_scatter_mean(flat, out, purpose="test").wait()
    chunk = slice(32 * engine.mesh.rank, 32 * engine.mesh.rank + 32)
    assert torch.equal(out, (everyone[0][chunk] + everyone[1][chunk]) / 2)


@ranks(2, 4)
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "vit"])
def test_share_of_everything_is_total_over_world(name: str) -> None:
    """Default settings on real architectures, no policy: really sharded, padding below N elements a unit."""
    model = build(ZOO[name])
    total = sum(p.numel() for p in model.parameters())
    engine = ZeroEngine(model, Mesh.from_world(Layout(dp=world_size())), stage=3)
    mine = sum(group.owned.numel() for group in engine.groups)
    n = world_size()
    assert total / n <= mine <= total / n + len(engine.groups)
    assert all(p.untyped_storage().nbytes() <= 8 for p in released_data(engine))
    root = sum(u.num_bytes for u in engine.units if u.name == ROOT)
    assert f"zero3 over {n} ranks" in memory_line(engine)
    assert root < 0.5 * sum(u.num_bytes for u in engine.units)


def released_data(engine: ZeroEngine) -> list[torch.Tensor]:
    """What parameters hold while released."""
    return [slot.stand_in for slot in engine.slots.values()]


@ranks(2)
def test_at_most_two_units_and_the_root_are_gathered_at_once() -> None:
    """The default prefetch is bounded by the largest unit; 0 turns it off."""
    for prefetch, most in ((None, 2), (0, 1)):
        torch.manual_seed(0)
        model = Stack(depth=8)
        engine = ZeroEngine(model, Mesh.from_world(Layout(dp=2)), stage=3, prefetch_bytes=prefetch)
        seen: list[int] = []

        def count(*_: object, engine: ZeroEngine = engine, seen: list[int] = seen) -> None:
            seen.append(sum(u.groups[0].compute.untyped_storage().nbytes() > 0 for u in engine.units))

        for layer in model.layers:
            layer.register_forward_pre_hook(count)
        for _ in range(3):
            with engine.step():
                engine.backward(model(torch.ones(2, 64)).mean())
        assert max(seen) == most
        engine.remove()


@ranks(2)
def test_a_layer_used_many_times_is_gathered_once_per_pass() -> None:
    """From the second step on, ALBERT's layer stays between its uses."""
    case = ZOO["albert"]
    model = build(case)
    engine = ZeroEngine(model, Mesh.from_world(Layout(dp=2)), stage=3)
    counts = []
    for step in range(3):
        with engine.mesh.ledger.measure() as sent, engine.step():
            part = local_batch(global_batch(case, step, samples=4), engine.mesh.rank, 2)
            engine.backward(case.loss(model, part))
        counts.append(sent.count(collective="all_gather", purpose="parameters"))
    assert counts[1] == counts[2] < counts[0]


def test_a_thousand_imaginary_ranks_fit_into_one_process() -> None:
    """The fake world: shapes, shares and the ledger of rank 7 of 1024, no peers."""
    with fake_world(1024, rank=7):
        torch.manual_seed(0)
        model = Stack()
        mesh = Mesh.from_world(Layout(dp=1024))
        engine = ZeroEngine(model, mesh, stage=3)
        optimizer = torch.optim.AdamW(model.parameters())
        engine.adopt(optimizer)
        with mesh.ledger.measure() as sent:
            with engine.step():
                engine.backward(model(torch.ones(2, 64)).mean())
            optimizer.step()
        per_layer = -(-(64 * 64 + 64) // 1024)
        assert sum(g.owned.numel() for g in engine.groups) == 4 * per_layer
        assert sent.total(purpose="gradients") == 4 * per_layer * 1023 * 4
        assert sent.total(purpose="parameters") == 2 * 4 * per_layer * 1023 * 4


@ranks(2)
def test_overlap_and_buckets_change_no_bit() -> None:
    """How many reductions are in flight and how much is prefetched is timing only: 20 steps, the same bits."""
    from lightning_dist.zero import reduce

    finals = []
    for in_flight, prefetch in ((0, 0), (1, 10**3), (2, None), (10**6, 10**9)):
        kept, reduce.MAX_IN_FLIGHT = reduce.MAX_IN_FLIGHT, in_flight
        try:
            torch.manual_seed(0)
            model = Stack()
            engine = ZeroEngine(model, Mesh.from_world(Layout(dp=2)), stage=3, prefetch_bytes=prefetch)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            engine.adopt(optimizer)
            generator = torch.Generator().manual_seed(engine.mesh.rank)
            for _ in range(20):
                optimizer.zero_grad()
                with engine.step():
                    inputs = torch.randn(2, 64, generator=generator)
                    engine.backward(F.mse_loss(model(inputs), inputs))
                optimizer.step()
            with engine.gathered(model):
                finals.append([p.detach().clone() for p in model.parameters()])
            engine.remove()
        finally:
            reduce.MAX_IN_FLIGHT = kept
    assert len(finals) == 4
    for other in finals[1:]:
        assert all(torch.equal(a, b) for a, b in zip(finals[0], other, strict=True))
