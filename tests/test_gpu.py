"""What only a GPU can show. One device is enough: a world of one over NCCL runs the same code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_dist.comm import Mesh
from lightning_dist.core.layout import Layout
from lightning_dist.zero import ZeroEngine
from tests.zoo import ZOO, build, global_batch

pytestmark = pytest.mark.gpu


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Mesh]:
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield Mesh.from_world(Layout(dp=1), device)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_on_cuda_equals_plain_training(world: Mesh, stage: int) -> None:
    case = ZOO["llama_tied"]
    reference, model = build(case).cuda(), build(case)
    engine = ZeroEngine(model, world, stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.adopt(optimizer)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(3):
        batch = {k: v.cuda() for k, v in global_batch(case, step, samples=4).items()}  # type: ignore[union-attr]
        with engine.step():
            engine.backward(case.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        case.loss(reference, batch).backward()
        plain.step()
        plain.zero_grad()
    with engine.gathered(model):
        for got, want in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_released_units_free_device_memory(world: Mesh) -> None:
    """At rest only the owned ranges are allocated."""
    before = torch.cuda.memory_allocated()
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(8)])
    engine = ZeroEngine(model, world, stage=3)
    owned = sum(group.owned.numel() * 4 for group in engine.groups)
    assert torch.cuda.memory_allocated() - before <= owned * 1.02 + 2**20
