"""Ranks that wait for each other in a circle stop at once; ranks that are only slow do not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dist import TensorParallelStrategy
from lightning_dist.comm import Mesh, Place
from lightning_dist.comm.neighbours import machine
from lightning_dist.core.errors import PeerLostError, RankMismatchError
from lightning_dist.core.layout import Layout
from tests.harness import rank, ranks
from tests.lit import trainer_on_ranks
from tests.pp.lit import Small, points

pytestmark = pytest.mark.skipif(machine() is None, reason="shared memory needs Linux on x86")


def stops(run: Callable[[], object]) -> str:
    """What the error says, on this rank; it comes within seconds."""
    begun = time.monotonic()
    with pytest.raises((RankMismatchError, PeerLostError)) as caught:
        run()
    assert time.monotonic() - begun < 60
    return str(caught.value)


@ranks(2, 4)
def test_two_roll_calls_that_never_meet() -> None:
    """Ranks 0 and 1 share an axis; rank 0 announces itself there and the others to the world."""
    layout = Layout(tp=2, dp=dist.get_world_size() // 2)
    mesh = Mesh.from_world(layout, timeout=1000.0)
    tp, world = mesh.tp.rollcall, mesh.rollcall
    assert tp is not None
    if tp is world:  # the axis is the world: the roll call itself tells the places apart
        said = stops(lambda: world.call(Place.READ if rank() == 0 else Place.BARRIER, what="for norm"))
    else:
        said = stops(lambda: tp.call(Place.READ, what="for norm") if rank() == 0 else world.call(Place.BARRIER))
    assert "rank 0 is reading values of which each tensor-parallel rank holds a part for norm" in said
    assert "is at a barrier" in said
    assert "if rank == 0:" in said


@ranks(4)
def test_a_circle_of_messages_and_collectives() -> None:
    """0 waits for a message of 2, which waits for a roll call of all; 3 waits for 1, which waits in a collective."""
    mesh = Mesh.from_world(Layout(pp=2, dp=2), timeout=1000.0)
    mail = mesh.pp.mail
    assert mail is not None
    waits: dict[int, Callable[[], Any]] = {
        0: lambda: mail.receive_object(1),
        1: lambda: mesh.dp.all_reduce(torch.ones(2), purpose="test"),
        2: lambda: mesh.rollcall.call(Place.BARRIER),
        3: lambda: mail.receive_object(0),
    }
    said = stops(waits[rank()])
    assert "the ranks wait for each other and would do so forever" in said


@ranks(3)
def test_slow_ranks_are_waited_for() -> None:
    """A chain of waits with someone at work at its end, a rank that sleeps where it could go on, and nobody stops."""
    mesh = Mesh.from_world(Layout(pp=3), timeout=1000.0)
    mail, me = mesh.pp.mail, rank()
    assert mail is not None
    for _ in range(2):
        if me == 2:
            time.sleep(4)
            mail.send_object("done", 1)
        else:
            assert mail.receive_object(me + 1) == "done"
            if me == 1:
                time.sleep(2)
                mail.send_object("done", 0)
        mesh.rollcall.call(Place.BARRIER)
    if me == 0:
        time.sleep(3)
    mesh.world.all_reduce(torch.ones(2), purpose="test")


class ReadsAlone(Small):
    """Rank 0 alone looks at a weight."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        if rank() == 0 and index == 1:
            float(self.blocks[0][0].weight.norm())  # type: ignore[index, union-attr]
        return loss


@ranks(2, 4)
def test_a_cut_weight_that_one_rank_reads_alone() -> None:
    strategy = TensorParallelStrategy(2, tp_plan={"blocks.*.0": "colwise"})
    trainer = trainer_on_ranks(strategy, max_epochs=1)
    layout = strategy.layout
    data = points(32, 8, replicas=layout.dp, replica=rank() // 2)
    said = stops(lambda: trainer.fit(ReadsAlone(), data))
    assert "reading values of which each tensor-parallel rank holds a part" in said


class EachItsOwn(Small):
    """Every rank looks at another weight of the same shape."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        if index == 1:
            float(self.blocks[rank()][0].weight.norm())  # type: ignore[index, union-attr]
        return loss


@ranks(2)
def test_ranks_that_read_different_weights_are_told_apart() -> None:
    trainer = trainer_on_ranks(TensorParallelStrategy(tp_plan={"blocks.*.0": "colwise"}), max_epochs=1)
    said = stops(lambda: trainer.fit(EachItsOwn(), points(32, 8)))
    assert "for norm of blocks.0.0.weight [6, 6]" in said
    assert "for norm of blocks.1.0.weight [6, 6]" in said
