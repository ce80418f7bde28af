"""Collectives over shared memory: the sums that gloo gives, in any order, growing, falling back, with dying peers."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dist.comm import Mesh, Place, shared
from lightning_dist.comm.arena import ALIGNMENT
from lightning_dist.comm.board import Terms
from lightning_dist.comm.collectives import Pending
from lightning_dist.comm.neighbours import machine
from lightning_dist.comm.shared import SharedMemory
from lightning_dist.core.errors import PeerLostError
from lightning_dist.core.layout import Layout
from lightning_dist.zero import ZeroEngine
from tests.harness import rank, ranks, run_script, world_size

pytestmark = pytest.mark.skipif(
    machine() is None,
    reason="shared memory rests on memfd and /proc of Linux and on x86, whose stores are seen in program order; "
    "elsewhere ranks talk over gloo, as the tests of everything else then show",
)


def connect(timeout: float = 60.0) -> SharedMemory:
    memory = SharedMemory.connect(dist.new_group(backend="gloo"), Terms(timeout))
    assert memory is not None
    return memory


def whole(size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What every rank contributes, in rank order; small integers, whose sums are exact in every dtype."""
    return [((torch.arange(size) + 3 * r) % 7).to(dtype) for r in range(world_size())]


@ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str)
def test_results_equal_what_they_should_be(dtype: torch.dtype) -> None:
    """Sizes from one element a rank to megabytes, growing and shrinking: 3 collectives x 8 sizes."""
    memory, n, me, seen = connect(), world_size(), rank(), 0
    for chunk in (1, 5, 4096, 3, 300_000, 70_001, 1, 0):
        everyone = whole(chunk * n, dtype)
        total = sum(everyone[1:], everyone[0].clone())
        flat = everyone[me].clone()
        memory.all_reduce(flat, scale=1.0).wait()
        assert torch.equal(flat, total)
        flat = torch.full_like(total, 9)
        flat.chunk(n)[me].copy_(everyone[me][me * chunk : (me + 1) * chunk]) if chunk else None
        memory.all_gather(flat).wait()
        assert torch.equal(flat, torch.cat([e[r * chunk : (r + 1) * chunk] for r, e in enumerate(everyone)]))
        out = torch.ones(chunk, dtype=dtype)
        memory.reduce_scatter(everyone[me].clone(), out, scale=1.0, add=True).wait()
        assert torch.equal(out, total[me * chunk : (me + 1) * chunk] + 1)
        seen += 3
    assert seen == 24


def start(memory: SharedMemory, flats: list[torch.Tensor]) -> tuple[list[Pending], list[torch.Tensor]]:
    """A sum of every one of them, and where this rank's part of the result will be.

    More than two ranks add up in two phases in an all-reduce, which all must take in one order; so they reduce-scatter.
    """
    if world_size() == 2:
        return [memory.all_reduce(flat, scale=1.0) for flat in flats], flats
    outs = [torch.empty(flat.numel() // world_size()) for flat in flats]
    return [memory.reduce_scatter(f, o, scale=1.0, add=False) for f, o in zip(flats, outs, strict=True)], outs


@ranks(2, 4)
def test_many_operations_under_way_finish_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start alike and wait in different orders; 300 operations, on a board of 16 slots."""
    monkeypatch.setattr(shared, "SLOTS", 16)
    memory, n = connect(), world_size()
    for turn in range(100):
        flats = [torch.full((1000 * n,), float(rank() + 1 + turn + k)) for k in range(3)]
        pending, outs = start(memory, flats)
        for k in (2, 0, 1) if rank() % 2 else (0, 1, 2):
            pending[k].wait()
            want = sum(r + 1 + turn + k for r in range(n))
            assert torch.equal(outs[k], torch.full_like(outs[k], float(want)))
    assert memory.count == 300 and not memory.done


@ranks(2, 3)
def test_what_a_peer_has_yet_to_read_is_not_written_over() -> None:
    """The last rank reads the last of three operations; the others start three more before it reads the first two."""
    memory, n, last = connect(), world_size(), rank() == world_size() - 1

    def values(turn: int) -> list[torch.Tensor]:
        return [torch.full((1000 * n,), float(100 * turn + 10 * k + rank())) for k in range(3)]

    def right(out: torch.Tensor, turn: int, k: int) -> bool:
        return torch.equal(out, torch.full_like(out, float(sum(100 * turn + 10 * k + r for r in range(n)))))

    pending, outs = start(memory, values(0))
    for k in (2,) if last else (0, 1, 2):
        pending[k].wait()
    dist.barrier()
    later, later_outs = start(memory, values(1)) if not last else ([], [])
    dist.barrier()
    for k in (1, 0) if last else ():
        pending[k].wait()
    assert [right(out, 0, k) for k, out in enumerate(outs)] == [True] * 3
    if last:
        later, later_outs = start(memory, values(1))
    for work in later:
        work.wait()
    assert [right(out, 1, k) for k, out in enumerate(later_outs)] == [True] * 3


@ranks(2)
def test_starting_never_waits_and_memory_grows_to_what_is_under_way() -> None:
    """One rank starts 640 operations before the other starts any; later ones use the same memory again."""
    memory = connect()
    sizes = [1000 * (k + 1) for k in range(40)] + [16_384] * 600  # of the size of the first segment, or more
    flats = [torch.full((size,), rank() + 1.0) for size in sizes]
    if rank() == 1:
        dist.recv(torch.zeros(1), 0)
    pending = [memory.all_reduce(flat, scale=0.5) for flat in flats]
    if rank() == 0:
        dist.send(torch.zeros(1), 1)
    for work in pending:
        work.wait()
    assert all(torch.equal(flat, torch.full_like(flat, 1.5)) for flat in flats)
    dist.barrier()
    assert 4 * sum(sizes) <= memory.arena.written_bytes <= 4 * sum(sizes) + ALIGNMENT * len(sizes)
    held, segments = memory.arena.written_bytes, len(memory.arena.segments)
    assert segments < 20
    for _ in range(200):
        memory.all_reduce(flats[-1], scale=0.5).wait()
    assert len(memory.arena.segments) == segments
    assert memory.arena.written_bytes - held < 4 * sizes[-1]  # at the end of a segment there may have been some room


@ranks(2)
def test_more_operations_than_the_board_has_slots_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SLOTS", 8)
    memory = connect()
    flats = [torch.full((10,), float(k)) for k in range(7)]
    pending = [memory.all_reduce(flat, scale=1.0) for flat in flats]
    with pytest.raises(RuntimeError, match="8 collectives were started and none of them was waited for"):
        memory.all_reduce(torch.ones(10), scale=1.0)
    for work in pending:
        work.wait()
    assert [float(flat[0]) for flat in flats] == [2.0 * k for k in range(7)]
    dist.barrier()  # until the peer has read them, they keep their slots
    memory.all_reduce(flats[0], scale=1.0).wait()


@ranks(2)
def test_a_mesh_knows_how_much_shared_memory_it_holds() -> None:
    """What this rank has written at once, in every channel; used again, it does not grow; none over gloo."""
    mesh = Mesh.from_world(Layout(dp=2), timeout=60.0)
    begun = mesh.shared_bytes
    flat = torch.ones(100_000)
    for _ in range(2):
        mesh.dp.all_reduce(flat, purpose="test")
        dist.barrier()
        assert mesh.shared_bytes == begun + 400_000
    mesh.dp.all_gather(flat, purpose="test").wait()  # of which a rank sends its half, on a channel of its own
    assert mesh.shared_bytes == begun + 600_000
    mesh.rollcall.call(Place.BARRIER)
    assert 0 < mesh.shared_bytes - begun - 600_000 <= 64
    assert Mesh.from_world(Layout(dp=2), shared_memory=False).shared_bytes == 0
    mailing = Mesh.from_world(Layout(pp=2), timeout=60.0)
    begun, mail = mailing.shared_bytes, mailing.pp.mail
    assert mail is not None
    if rank() == 0:
        mail.send([torch.ones(1024)], 1, channel="forward", purpose="test")
    else:
        mail.post([torch.empty(1024)], 0, channel="forward").wait()
    assert mailing.shared_bytes == begun + (4096 if rank() == 0 else 0)


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_many_units(stage: int) -> None:
    """Forty equal units, all of whose collectives are under way at once where nothing makes them wait: the weights of
    one process after three steps, by an arena that began with room for a few.
    """

    def build() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(64, 64) for _ in range(40)]).double()

    def loss(layers: nn.ModuleList, rows: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            rows = torch.tanh(layer(rows))
        return rows.square().mean()

    batch = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone, model = build(), build()
    engine = ZeroEngine(model, Mesh.from_world(Layout(dp=2), timeout=60.0), stage=stage)
    assert len(engine.units) == 40 and engine.mesh.dp.shared
    reference = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine.adopt(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        with engine.step():
            engine.backward(loss(model, batch[2 * rank() : 2 * rank() + 2]))
        loss(alone, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        reference.step()
    with engine.gathered(model):
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-10, atol=1e-13)


@ranks(2)
def test_it_can_be_switched_off() -> None:
    mesh = Mesh.from_world(Layout(dp=2), shared_memory=False)
    assert not mesh.dp.shared and mesh.rollcall.shared is None
    flat = torch.full((10,), rank() + 1.0)
    mesh.dp.all_reduce(flat, purpose="test")
    assert torch.equal(flat, torch.full_like(flat, 3.0))


@ranks(2)
def test_a_peer_that_does_not_come_is_an_error() -> None:
    memory = connect(timeout=0.5)
    if rank() == 0:
        with pytest.raises(PeerLostError, match=r"rank 1 of its group .* did not come within 0\.5 s"):
            memory.all_reduce(torch.ones(10), scale=1.0).wait()
    dist.barrier()


DYING = """
import os, signal, sys, tempfile, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
from lightning_dist.comm.board import Terms
from lightning_dist.comm.shared import SharedMemory
from lightning_dist.core.errors import PeerLostError

def go(rank, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    memory = SharedMemory.connect(dist.new_group(backend="gloo"), Terms(1000.0))
    flat = torch.ones(100_000)
    memory.all_reduce(flat, scale=1.0).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        memory.all_reduce(flat, scale=1.0).wait()
    except PeerLostError as error:
        print("NOTICED", time.monotonic() - begun < 20, str(error).splitlines()[0], flush=True)
        os._exit(0)

if __name__ == "__main__":
    store = os.path.join(tempfile.mkdtemp(), "store")
    processes = [mp.get_context("spawn").Process(target=go, args=(r, store)) for r in range(2)]
    [p.start() for p in processes]
    [p.join() for p in processes]
"""


def test_a_peer_that_dies_is_noticed() -> None:
    output = run_script(DYING, timeout=300).output
    assert (
        "NOTICED True stops in a collective or waiting for a message: rank 1 of its group has died: its process"
        in output
    )


@ranks(2)
def test_what_was_sent_is_read_after_its_sender_has_gone() -> None:
    """A rank drops its channel, and with it all it has, while its peer has yet to read the last operation."""
    memory = connect()
    flat = torch.full((100_000,), rank() + 1.0)
    pending = memory.all_reduce(flat, scale=1.0)
    if rank() == 0:
        pending.wait()
        del memory, pending
        gc.collect()
    dist.barrier()
    if rank() == 1:
        pending.wait()
    assert torch.equal(flat, torch.full_like(flat, 3.0))


@ranks(2)
def test_memory_has_no_name_and_goes_with_its_channel() -> None:
    """Nothing is made in any folder; what is mapped goes when a mesh is dropped: a run of many Trainers keeps none."""
    before = maps()
    memory = connect()
    memory.all_reduce(torch.ones(100_000), scale=1.0).wait()
    assert len(maps()) == len(before) + 3  # the board, and an arena each
    dist.barrier()
    del memory
    gc.collect()
    assert maps() == before


def maps() -> list[str]:
    """Anonymous memory that this process has mapped; that it has no name is part of the line."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line for line in lines if line.endswith("/memfd:lightning_dist (deleted)"))
