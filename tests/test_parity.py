"""The law of parity: every stage trains every model of the zoo as one process does, in float64, on gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_dist.comm import Axis, Mesh, Place
from lightning_dist.comm.collectives import Pending
from lightning_dist.core.layout import Layout
from lightning_dist.zero import ZeroEngine
from lightning_dist.zero.flat import FlatGroup
from tests.harness import rank, ranks, world_size
from tests.zoo import ZOO, Case, Reference, assert_same_run, build, global_batch, local_batch, reference_steps

STEPS = 3
SAMPLES_PER_RANK = 2
MODES = [
    (0, "shard", 1),
    (0, "shard", 2),
    (1, "shard", 1),
    (1, "shard", 2),
    (2, "shard", 2),
    (2, "local", 2),
    (3, "shard", 1),
    (3, "shard", 2),
    (3, "local", 2),
]
"""(stage, accumulate, batches per step): a stage that accumulates differently is swept both ways."""


def optimizer_of(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2, weight_decay=0.1)


def train(case: Case, stage: int, accumulate: str, batches: int, *, prefetch: int | None = None) -> Reference:
    """Train on the ranks; what this rank knows of the run afterwards."""
    model = build(case)
    mesh = Mesh.from_world(Layout(dp=world_size()))
    engine = ZeroEngine(model, mesh, stage=stage, accumulate=accumulate, prefetch_bytes=prefetch)  # type: ignore[arg-type]
    optimizer = optimizer_of(model.parameters())
    engine.adopt(optimizer)
    run = Reference()
    samples = SAMPLES_PER_RANK * world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for index in range(batches):
            part = local_batch(global_batch(case, step, index, samples=samples), rank(), world_size())
            with engine.step():
                loss = case.loss(model, part)
                engine.backward(loss / batches, sync=index == batches - 1)
            mesh.rollcall.call(Place.METRIC)
            losses.append(mesh.dp.all_reduce(loss.detach().clone().view(1), purpose="test").item() / world_size())
        run.losses.append(sum(losses) / batches)
        with engine.gathered(model, gradients=True):
            run.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    with engine.gathered(model):
        run.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    if rank() == 0:
        run.buffers = {name: b.clone() for name, b in model.named_buffers()}
    engine.remove()
    return run


def reference(case: Case, batches: int) -> Reference:
    samples = SAMPLES_PER_RANK * world_size()
    return reference_steps(case, batches, world_size(), STEPS, optimizer_of, samples=samples)


@ranks(2, 4)
@pytest.mark.parametrize("name", ZOO)
def test_every_stage_equals_one_process(name: str) -> None:
    case = ZOO[name]
    warnings.filterwarnings("ignore", message=".*is read outside the forward.*")
    truth = {batches: reference(case, batches) for batches in (1, 2)}
    swept = 0
    for stage, accumulate, batches in MODES:
        try:
            assert_same_run(train(case, stage, accumulate, batches), truth[batches])
        except Exception as error:
            raise AssertionError(f"stage {stage}, accumulate={accumulate}, {batches} batches: {error}") from error
        swept += 1
    assert swept == len(MODES) == 9


@ranks(2)
@pytest.mark.parametrize("prefetch", (0, 1_000, 10**9))
@pytest.mark.parametrize("name", ("llama", "llama_tied", "albert", "moe_toplevel", "layerdrop", "penalty"))
def test_prefetch_changes_no_number(name: str, prefetch: int) -> None:
    """From nothing ahead of need to the whole model: the same run to the bit."""
    warnings.filterwarnings("ignore", message=".*is read outside the forward.*")
    plain = train(ZOO[name], 3, "shard", 1, prefetch=0)
    ahead = train(ZOO[name], 3, "shard", 1, prefetch=prefetch)
    assert plain.losses == ahead.losses
    for key, value in plain.parameters.items():
        assert torch.equal(value, ahead.parameters[key]), key


# Sabotage: a guard must be able to fail -------------------------------------------------------------------------


@contextmanager
def replaced(owner: type, name: str, make: Callable[[Callable[..., object]], Callable[..., object]]) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, make(kept))
    try:
        yield
    finally:
        setattr(owner, name, kept)


def dropped_reduce(_: Callable[..., object]) -> Callable[..., object]:
    """Every rank keeps its own gradient."""

    def reduce(axis: Axis, flat: torch.Tensor, out: torch.Tensor, **options: object) -> Pending:
        chunk = flat.chunk(axis.size)[axis.rank]

        def keep() -> None:
            (out.add_ if options.get("add") else out.copy_)(chunk)

        return Pending((), keep)

    return reduce


def doubled(reduce: Callable[..., Pending]) -> Callable[..., object]:
    """The mean is taken for a sum."""

    def wrong(axis: Axis, flat: torch.Tensor, *rest: object, **options: object) -> Pending:
        return reduce(axis, flat.mul_(axis.size), *rest, **options)

    return wrong


def stale_parameters(_: Callable[..., object]) -> Callable[..., object]:
    """Updated shards are not spread."""
    return lambda group: Pending()


def doubled_gradient(pack: Callable[..., object]) -> Callable[..., object]:
    """The first parameter of each group is counted twice, as an untied copy would be."""

    def wrong(group: FlatGroup, slot: object, gradient: torch.Tensor, **options: object) -> object:
        return pack(group, slot, gradient * 2 if slot is group.slots[0] else gradient, **options)

    return wrong


SABOTAGE: dict[str, tuple[int, type, str, Callable[..., Callable[..., object]]]] = {
    "dropped_reduce": (2, Axis, "reduce_scatter_mean", dropped_reduce),
    "doubled_scale": (2, Axis, "reduce_scatter_mean", doubled),
    "doubled_scale_all_reduce": (0, Axis, "all_reduce_mean", doubled),
    "stale_parameters": (1, FlatGroup, "start_refresh", stale_parameters),
    "doubled_gradient": (3, FlatGroup, "pack", doubled_gradient),
}


@ranks(2)
@pytest.mark.parametrize("name", SABOTAGE)
def test_parity_catches_sabotage(name: str) -> None:
    stage, owner, method, make = SABOTAGE[name]
    case = ZOO["llama_tied"]
    truth = reference(case, 1)
    with replaced(owner, method, make):
        run = train(case, stage, "shard", 1)
    with pytest.raises(AssertionError, match=r"gradient|parameter|losses"):
        assert_same_run(run, truth)


def test_the_sweep_covers_the_zoo() -> None:
    required = {
        "llama", "llama_tied", "gpt2", "bert", "vit", "transformer_encoder", "conv_batchnorm", "lora", "moe_layers",
        "moe_toplevel", "albert", "shared_module_twice", "unused", "odd", "llama_recompute",
        "llama_recompute_reentrant",
        "mixed_frozen", "penalty", "direct_read", "layerdrop",
    }  # fmt: skip
    assert required <= set(ZOO), required - set(ZOO)
    assert len(ZOO) * 2 * len(MODES) >= 360
    assert len(SABOTAGE) == 5
