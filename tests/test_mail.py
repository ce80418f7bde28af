"""Mail along the pipeline axis: order, memory, dtypes, failures and figures, through shared memory and over gloo."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.comm import Mesh, Place, fake_world
from lightning_dist.comm.backend_mail import BackendCarrier, stream_of
from lightning_dist.comm.ledger import Ledger
from lightning_dist.comm.mail import Letter, Mail, Packing
from lightning_dist.comm.neighbours import machine
from lightning_dist.comm.shared_mail import SLOTS, SharedCarrier
from lightning_dist.core.errors import ConfigurationError, PeerLostError, RankMismatchError
from lightning_dist.core.layout import Layout
from tests.harness import rank, ranks, run_script, world_size

pytestmark = pytest.mark.skipif(machine() is None, reason="shared memory needs Linux on x86")

MEMORY, GLOO, STREAMS = "memory", "gloo", "streams"
everywhere = pytest.mark.parametrize("way", [MEMORY, GLOO, STREAMS])
"""Streams are how NCCL is used, here with groups of gloo."""


def connect(way: str, timeout: float = 60.0) -> Mail:
    if way == STREAMS:
        carrier = BackendCarrier.connect(
            dist.new_group(backend="gloo"), torch.device("cpu"), lambda: dist.new_group(backend="gloo")
        )
        assert len(carrier.streams) == {2: 4, 3: 8, 4: 8}[world_size()]
        return Mail("pp", rank(), world_size(), carrier, Ledger())
    mesh = Mesh.from_world(Layout(pp=world_size()), shared_memory=way == MEMORY, timeout=timeout)
    mail = mesh.pp.mail
    assert mail is not None and isinstance(mail.carrier, SharedCarrier if way == MEMORY else BackendCarrier)
    return mail


def memory_mail(timeout: float = 60.0) -> tuple[Mail, SharedCarrier]:
    mail = connect(MEMORY, timeout)
    assert isinstance(mail.carrier, SharedCarrier)
    return mail, mail.carrier


def others() -> list[int]:
    return [peer for peer in range(world_size()) if peer != rank()]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# What arrives -------------------------------------------------------------------------------------------------


@ranks(2, 4)
@everywhere
def test_messages_arrive_in_order_on_each_channel(way: str) -> None:
    """Every rank sends to every other, channels interleaved, before it receives anything; channel by channel."""
    mail, me, n, seen = connect(way), rank(), world_size(), 0
    for k in range(20):
        for peer in others():
            for sign, channel in ((1, "forward"), (-1, "backward")):
                tensor = torch.full((k, 3), float(sign * (100 * me + k)))
                mail.send([tensor, torch.tensor(k)], peer, channel=channel, purpose=channel)
                tensor.zero_()  # what was sent is not touched by this
            mail.send_object({"number": k, "from": me}, peer)
    for peer in others():
        for sign, channel in ((-1, "backward"), (1, "forward")):
            letters = [mail.post([meta(k, 3), meta(dtype=torch.int64)], peer, channel=channel) for k in range(20)]
            for k, letter in enumerate(letters):
                got, number = letter.wait()
                assert torch.equal(got, torch.full((k, 3), float(sign * (100 * peer + k)))) and number == k
                seen += 1
        assert [mail.receive_object(peer) for _ in range(20)] == [{"number": k, "from": peer} for k in range(20)]
    mail.flush()
    assert seen == 40 * (n - 1)
    sent = (n - 1) * sum(k * 12 + 8 for k in range(20))
    assert mail.ledger.total(axis="pp", collective="send", purpose="forward") == sent
    assert mail.ledger.total(axis="pp", collective="send") == 2 * sent
    assert mail.ledger.count(axis="pp", collective="send") == 40 * (n - 1)
    assert mail.ledger.count(axis="pp", collective="send_object", purpose="object") == 20 * (n - 1)
    dist.barrier()


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]


def odd_tensors(dtype: torch.dtype) -> list[Tensor]:
    """Every way in which a tensor may lie: no elements, no dims, turned, repeated, with holes, seen as a conjugate."""
    base = (torch.arange(60).reshape(3, 4, 5) % 2 - (0 if dtype in (torch.bool, torch.uint8) else 2)).to(dtype)
    odd = [base, base.transpose(0, 2), base[:, ::2, 1:], base[1, 2, 3], base[:0], base[:, :, :0]]
    return [*odd, base[0, :1].expand(7, 5), (base * 1j).conj() if dtype.is_complex else base.view(12, 5)]


@ranks(2)
@everywhere
def test_dtypes_and_strides(way: str) -> None:
    """12 dtypes, 8 tensors each, in one message and one by one; with those that require a gradient."""
    mail, peer, seen = connect(way), 1 - rank(), 0
    for dtype in DTYPES:
        tensors = odd_tensors(dtype)
        if dtype.is_floating_point:
            tensors[1].requires_grad_()
        for sent in (tensors, *([tensor] for tensor in tensors), []):
            mail.send(sent, peer, channel="forward", purpose="test")
            letter = mail.post([meta(*tensor.shape, dtype=dtype) for tensor in sent], peer, channel="forward")
            got = letter.wait()
            assert len(got) == len(sent)
            for one, other in zip(got, sent, strict=True):
                assert one.dtype == dtype and one.shape == other.shape and torch.equal(one, other.detach())
                assert one.is_contiguous() and not one.requires_grad
                one.fill_(1)  # it belongs to the caller
                seen += 1
    mail.flush()
    assert seen == 12 * 8 * 2
    dist.barrier()


@ranks(2, 3, 4)
@everywhere
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(way: str, seed: int) -> None:
    """All ranks draw one plan; each does its part in an order of its own and compares all that comes with the plan."""
    mail, me, n = connect(way), rank(), world_size()
    plan_draws, own_draws = random.Random(seed), random.Random(1000 * seed + me)
    plan = []
    for number in range(150):
        sender, receiver = plan_draws.sample(range(n), 2)
        shapes = [
            tuple(plan_draws.choice((0, 1, 2, 7, 33, 200)) for _ in range(plan_draws.randrange(3)))
            for _ in range(plan_draws.randrange(4))
        ]
        plan.append((number, sender, receiver, plan_draws.choice(("forward", "backward", "objects")), shapes))

    def content(number: int, shapes: list[tuple[int, ...]]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + number)
        dtype = (torch.float32, torch.bfloat16, torch.float64)[number % 3]
        return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    steps = [entry for entry in plan if me in entry[1:3]]
    open_letters, seen = [], 0
    for number, sender, receiver, channel, shapes in steps:
        tensors = content(number, shapes)
        if me == sender and channel == "objects":
            mail.send_object((number, shapes), receiver)
        elif me == sender:
            mail.send(tensors, receiver, channel=channel, purpose="test")
        elif channel == "objects":
            assert mail.receive_object(sender) == (number, shapes)
            seen += 1
        else:
            like = [tensor.to("meta") for tensor in tensors]
            open_letters.append((number, shapes, mail.post(like, sender, channel=channel)))
        while open_letters and own_draws.random() < 0.4:
            number, shapes, letter = open_letters.pop(own_draws.randrange(len(open_letters)))
            assert all(torch.equal(a, b) for a, b in zip(letter.wait(), content(number, shapes), strict=True))
            seen += 1
    own_draws.shuffle(open_letters)
    for number, shapes, letter in open_letters:
        assert all(torch.equal(a, b) for a, b in zip(letter.wait(), content(number, shapes), strict=True))
        seen += 1
    mail.flush()
    assert seen == sum(entry[2] == me for entry in plan)
    assert mail.ledger.count(collective="send") == sum(e[1] == me and e[3] != "objects" for e in plan)
    dist.barrier()


@ranks(2)
@everywhere
def test_letters_are_opened_in_any_order(way: str) -> None:
    """Three are always left for later: what is sent meanwhile does not take their place, nor that of what has come."""
    mail, peer = connect(way), 1 - rank()
    waiting: dict[int, Letter] = {}
    arrived: dict[int, Tensor] = {}
    for turn in range(20):
        for number in range(6 * turn, 6 * turn + 6):
            mail.send([torch.full((100,), number)], peer, channel="forward", purpose="test")
            waiting[number] = mail.post([meta(100, dtype=torch.int64)], peer, channel="forward")
        for number in sorted(waiting, key=lambda number: number * 31 % 23)[3 if turn < 19 else 0 :]:
            letter = waiting.pop(number)
            (arrived[number],) = letter.wait()
        dist.barrier()
    assert len(arrived) == 120
    assert all(torch.equal(tensor, torch.full((100,), number)) for number, tensor in arrived.items())
    with pytest.raises(RuntimeError, match="called twice on one letter"):
        letter.wait()
    mail.flush()
    dist.barrier()


# What it takes ------------------------------------------------------------------------------------------------


@ranks(2, 4)
def test_memory_grows_to_what_is_under_way_and_no_further() -> None:
    """100 messages of 40 kB to every rank before any is taken; then 300 rounds with 4 under way: nothing is added."""
    mail, carrier = memory_mail()
    burst, size = 100, 40_000

    def send(peer: int) -> None:
        mail.send([torch.full((size // 4,), float(rank()))], peer, channel="forward", purpose="test")

    def receive(peer: int) -> None:
        (got,) = mail.post([meta(size // 4)], peer, channel="forward").wait()
        assert torch.equal(got, torch.full((size // 4,), float(peer)))

    for peer in others():
        for _ in range(burst):
            send(peer)
    for arena in carrier.arenas.values():
        assert len(arena.lent) == burst and burst * size <= arena.written_bytes <= 1.01 * burst * size
        assert arena.num_bytes <= 2 * burst * size and len(arena.segments) < 10
    dist.barrier()
    for peer in others():
        for _ in range(burst):
            receive(peer)
    dist.barrier()
    held = [(arena.num_bytes, arena.written_bytes) for arena in carrier.arenas.values()]
    for turn in range(300):
        for peer in others():
            send(peer)
            if turn >= 4:
                receive(peer)
    for peer in others():
        for _ in range(4):
            receive(peer)
    assert held == [(arena.num_bytes, arena.written_bytes) for arena in carrier.arenas.values()]
    dist.barrier()
    mail.send([], others()[0], channel="backward", purpose="test")  # on this occasion it frees what was taken
    assert len(carrier.arenas[others()[0]].lent) == 1
    dist.barrier()


@ranks(2)
def test_few_under_way_take_little_memory() -> None:
    """A steady flow of 1000 messages of 1 MB with two under way takes room for no more than four."""
    mail, carrier = memory_mail()
    if rank() == 0:
        for _ in range(1000):
            mail.send([torch.ones(1 << 18)], 1, channel="forward", purpose="test")
            mail.receive_object(1)
        assert carrier.arenas[1].written_bytes <= 4 << 20
    else:
        mail.send_object("go on", 0)
        for _ in range(1000):
            mail.send_object("go on", 0)
            mail.post([meta(1 << 18)], 0, channel="forward").wait()
    dist.barrier()


@ranks(2)
def test_copies_over_gloo_go_with_flush() -> None:
    mail = connect(GLOO)
    assert isinstance(mail.carrier, BackendCarrier)
    for _ in range(10):
        mail.send([torch.ones(1000)], 1 - rank(), channel="forward", purpose="test")
    kept = sum(memory.numel() for works in mail.carrier.under_way.values() for _, memory in works)
    assert kept == 10 * (4032 + 64)  # 4000 bytes and what aligns them, and the digest
    for _ in range(10):
        mail.post([meta(1000)], 1 - rank(), channel="forward").wait()
    mail.flush()
    assert not any(mail.carrier.under_way.values())
    dist.barrier()


@ranks(2)
def test_memory_goes_with_the_mesh() -> None:
    before = maps()
    mail, carrier = memory_mail()
    mail.send([torch.ones(100_000)], 1 - rank(), channel="forward", purpose="test")
    mail.post([meta(100_000)], 1 - rank(), channel="forward").wait()
    assert len(maps()) > len(before)
    dist.barrier()
    del mail, carrier
    gc.collect()
    assert maps() == before


def maps() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line for line in lines if line.endswith("/memfd:lightning_dist (deleted)"))


@ranks(2)
def test_more_than_the_board_has_room_for_is_refused() -> None:
    mail, _ = memory_mail()
    if rank() == 0:
        for _ in range(SLOTS):
            mail.send([], 1, channel="forward", purpose="test")
        with pytest.raises(RuntimeError, match=f"{SLOTS} messages are under way to rank 1 on the channel forward"):
            mail.send([], 1, channel="forward", purpose="test")
        mail.send([], 1, channel="backward", purpose="test")
    dist.barrier()


# What is refused, and failures --------------------------------------------------------------------------------


@ranks(2)
@everywhere
def test_refusals(way: str) -> None:
    mail, me = connect(way), rank()
    for call in (
        lambda peer, channel="forward": mail.send([], peer, channel=channel, purpose="test"),
        lambda peer, channel="forward": mail.post([], peer, channel=channel),
    ):
        with pytest.raises(ConfigurationError, match=f"rank {me} of axis pp would send a message to itself"):
            call(me)
        with pytest.raises(ConfigurationError, match="axis pp has ranks 0 to 1, none of number 2"):
            call(2)
        with pytest.raises(ConfigurationError, match='no channel "sideways"; use one of forward, backward'):
            call(1 - me, "sideways")
        with pytest.raises(ConfigurationError, match='no channel "objects"; use one of forward, backward'):
            call(1 - me, "objects")
    with pytest.raises(ConfigurationError, match="to itself"):
        mail.send_object("hello", me)
    with pytest.raises(ConfigurationError, match="to itself"):
        mail.receive_object(me)
    assert not mail.ledger.calls
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("way", [MEMORY, GLOO])
@pytest.mark.parametrize(
    "like",
    [meta(6), meta(2, 3, dtype=torch.int32), meta(3, 2), meta(100)],
    ids=["dims", "dtype", "turned", "longer"],
)
def test_other_tensors_than_those_expected_are_an_error(
    way: str, like: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where memory is used again that has held what is expected."""
    mail, peer = connect(way), 1 - rank()
    digest = Packing.of([like]).digest
    if isinstance(mail.carrier, BackendCarrier):

        def used(packing: Packing) -> Tensor:
            return torch.full((packing.num_bytes // 8 + 8,), digest).view(torch.uint8)

        monkeypatch.setattr(mail.carrier, "_memory", used)
    mail.send([torch.ones(2, 3)], peer, channel="forward", purpose="test")
    letter = mail.post([like], peer, channel="forward")
    with pytest.raises(RankMismatchError, match=f"rank {peer} of the axis sent other .* expected here: torch"):
        letter.wait()
    mail.flush()
    dist.barrier()


@ranks(2)
def test_a_peer_that_does_not_send_is_an_error() -> None:
    mail, _ = memory_mail(timeout=0.5)
    if rank() == 0:
        with pytest.raises(PeerLostError, match=r"rank 1 of its group .* did not come within 0\.5 s"):
            mail.post([meta(3)], 1, channel="forward").wait()
        with pytest.raises(PeerLostError, match=r"rank 1 of its group .* did not come within 0\.5 s"):
            mail.receive_object(1)
    dist.barrier()


DYING = """
import os, signal, sys, tempfile, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
from lightning_dist.comm import Mesh
from lightning_dist.comm.neighbours import alive
from lightning_dist.core.errors import PeerLostError
from lightning_dist.core.layout import Layout

def go(rank, store, shared):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mail = Mesh.from_world(Layout(pp=2), shared_memory=shared, timeout=1000.0).pp.mail
    if rank == 1:
        mail.send([torch.ones(100_000)], 0, channel="forward", purpose="test")
        mail.send_object(os.getpid(), 0)
        if not shared:
            mail.receive_object(0)
        os.kill(os.getpid(), signal.SIGKILL)
    letters = [mail.post([torch.empty(100_000, device="meta")], 1, channel="forward") for _ in range(2)]
    peer = mail.receive_object(1)
    while shared and alive(peer):
        time.sleep(0.01)
    assert float(letters[0].wait()[0].sum()) == 100_000  # in memory, it outlives its sender
    if not shared:
        mail.send_object("die", 1)
    begun = time.monotonic()
    try:
        letters[1].wait()
    except PeerLostError as error:
        print("NOTICED", time.monotonic() - begun < 20, str(error), flush=True)
        os._exit(0)

if __name__ == "__main__":
    store = os.path.join(tempfile.mkdtemp(), "store")
    processes = [mp.get_context("spawn").Process(target=go, args=(r, store, sys.argv[1] == "memory")) for r in range(2)]
    [p.start() for p in processes]
    [p.join() for p in processes]
"""


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (MEMORY, "stops in a collective or waiting for a message: rank 1 of its group has died: its process"),
        (GLOO, "stops at a message: rank 1 of its axis failed or died"),
    ],
)
def test_a_peer_that_dies_is_noticed(way: str, words: str) -> None:
    output = run_script(DYING.replace("sys.argv[1]", repr(way)), timeout=300).output
    assert f"NOTICED True {words}" in output


ABORTED = r"rank 0 of the world has failed: ValueError: bad batch \(see its own traceback\)\. Nothing goes on before"
WAITS: dict[str, Callable[[Mesh, Mail, int], object]] = {
    "mail": lambda mesh, mail, peer: mail.post([meta(3)], peer, channel="backward").wait(),
    "objects": lambda mesh, mail, peer: mail.receive_object(peer),
    "collective": lambda mesh, mail, peer: mesh.world.all_reduce(torch.ones(3), purpose="test"),
    "maximum": lambda mesh, mail, peer: mesh.world.all_reduce(torch.ones(3), purpose="test", op="max"),
    "broadcast": lambda mesh, mail, peer: mesh.world.broadcast(torch.ones(3), purpose="test"),
    "collect": lambda mesh, mail, peer: mesh.world.collect(
        torch.ones(1), [1] * 4, purpose="test", out=torch.ones(4) if rank() == 0 else None
    ),
    "roll call": lambda mesh, mail, peer: mesh.rollcall.call(Place.BARRIER),
    "exchange": lambda mesh, mail, peer: mesh.rollcall.exchange(rank()),
    "object from one": lambda mesh, mail, peer: mesh.rollcall.broadcast(rank()),
    "flags": lambda mesh, mail, peer: mesh.rollcall.any_rank([True]),
}


@ranks(4)
@pytest.mark.parametrize("place", WAITS)
def test_abort_reaches_all_who_wait(place: str) -> None:
    """Rank 3 has no axis in common with rank 0, which fails; it waits for rank 1 or 2, which live and say nothing."""
    mesh = Mesh.from_world(Layout(pp=2, dp=2), timeout=1000.0)
    mail, me = mesh.pp.mail, rank()
    assert mail is not None and mesh.alarm is not None
    if me == 0:
        mail.send([torch.ones(3)], 1, channel="forward", purpose="test")
        wait_until_all_wait()
        mesh.abort("ValueError: bad batch")
        mesh.abort("and then something else")
        with pytest.raises(PeerLostError, match="stops because this rank has failed: ValueError: bad batch"):
            mail.receive_object(1)
    else:
        peer = 1 - mail.rank
        wait_until_all_wait()
        with pytest.raises(PeerLostError, match=ABORTED) as caught:
            WAITS[place](mesh, mail, peer)
        mesh.abort(f"PeerLostError: {caught.value}")  # what follows from the first failure is not the cause
        assert place != "roll call" or f"rank {me} is at a barrier and stops" in str(caught.value)
        with pytest.raises(
            PeerLostError, match=rf"^stops because {ABORTED}"
        ):  # who begins to wait later hears of it too
            mail.post([meta(3)], peer, channel="backward").wait()
        if me == 2:  # what had been sent before is there
            (got,) = mail.post([meta(3)], 0, channel="forward").wait()
            assert torch.equal(got, torch.ones(3))
    dist.barrier()


def wait_until_all_wait() -> None:
    """Over gloo, as it must not be noticed."""
    dist.barrier()


@ranks(4)
def test_a_mesh_recovers_once_all_ranks_have_met() -> None:
    """What was under way when it was aborted is gone, on every channel; all that waits works, and it may fail again."""
    mesh = Mesh.from_world(Layout(pp=2, dp=2), timeout=1000.0)
    mail, me = mesh.pp.mail, rank()
    assert mail is not None
    peer = 1 - mail.rank
    for turn in range(1, 4):
        if me == 2:  # some ranks have begun what the others never will
            mail.send([torch.full((3,), 99.0)], peer, channel="forward", purpose="test")
            mail.post([meta(5)], peer, channel="backward")
            mail.send_object("lost", peer)
        mesh.world.start_all_reduce(torch.ones(7), purpose="test") if me in (1, 2) else None
        mesh.dp.all_gather(torch.ones(4), purpose="test") if me == 3 else None
        mesh.abort("on purpose") if me == 3 else None
        wait_until_all_wait()
        assert mesh.aborted
        assert mesh.recover()
        assert not mesh.aborted
        for channel in ("forward", "backward"):
            for number in range(3):
                mail.send([torch.full((3,), float(me + number))], peer, channel=channel, purpose="test")
        mail.send_object(me, peer)
        other = mesh.pp.ranks[peer]
        assert mail.receive_object(peer) == other
        for channel in ("forward", "backward"):
            for number in range(3):
                (got,) = mail.post([meta(3)], peer, channel=channel).wait()
                assert torch.equal(got, torch.full((3,), float(other + number)))
        flat = torch.full((5,), float(me + turn))
        assert torch.equal(mesh.world.all_reduce(flat.clone(), purpose="t"), torch.full((5,), 6.0 + 4 * turn))
        assert torch.equal(mesh.world.all_reduce(flat.clone(), purpose="t", op="max"), torch.full((5,), 3.0 + turn))
        assert torch.equal(mesh.world.all_reduce(flat.clone(), purpose="t", op="min"), torch.full((5,), 0.0 + turn))
        assert torch.equal(mesh.world.broadcast(flat.clone(), purpose="t", source=2), torch.full((5,), 2.0 + turn))
        sizes = [3, 0, 1, 2]
        out = torch.zeros(6) if me == 0 else None
        mesh.world.collect(torch.full((sizes[me],), float(me)), sizes, purpose="t", out=out)
        assert out is None or out.tolist() == [0, 0, 0, 2, 3, 3]
        assert mesh.rollcall.exchange("x" * me) == ["", "x", "xx", "xxx"]
        assert mesh.rollcall.broadcast({"of": me}, 1) == {"of": 1}
        assert mesh.rollcall.any_rank([me == 1, False]) == [True, False]


@ranks(2)
def test_a_mesh_on_a_backend_recovers_unless_messages_are_under_way() -> None:
    mesh = Mesh.from_world(Layout(pp=2), shared_memory=False)
    mail = mesh.pp.mail
    assert mail is not None
    assert not mesh.recover()
    mail.send([torch.ones(3)], 1 - rank(), channel="forward", purpose="test")
    assert torch.equal(mail.post([meta(3)], 1 - rank(), channel="forward").wait()[0], torch.ones(3))
    mail.flush()
    assert not mesh.recover()
    letter = mail.post([meta(3)], 1, channel="forward") if rank() == 0 else None
    with pytest.raises(PeerLostError, match=r"still under way.*start all ranks again"):
        mesh.recover()
    if letter is None:
        mail.send([torch.ones(3)], 0, channel="forward", purpose="test")
        mail.flush()
    else:
        letter.wait()


@ranks(2)
def test_abort_without_shared_memory_does_nothing() -> None:
    mesh = Mesh.from_world(Layout(pp=2), shared_memory=False)
    mesh.abort("nobody hears this")
    flat = torch.ones(3)
    mesh.pp.all_reduce(flat, purpose="test")
    assert torch.equal(flat, torch.full((3,), 2.0))


# Where nothing travels ----------------------------------------------------------------------------------------


def test_a_fake_world_gives_zeros() -> None:
    with fake_world(8, rank=3):
        mesh = Mesh.from_world(Layout(pp=4, dp=2))
        mail = mesh.pp.mail
        assert mail is not None and mesh.dp.mail is None and mesh.world.mail is None
        mail.send([torch.ones(2, 3), torch.ones(0)], 2, channel="forward", purpose="activations")
        mail.send_object("hello", 2)
        got = mail.post([meta(2, 3), meta(4, dtype=torch.bool)], 0, channel="backward").wait()
        assert torch.equal(got[0], torch.zeros(2, 3)) and torch.equal(got[1], torch.zeros(4, dtype=torch.bool))
        assert mail.receive_object(0) is None
        mail.flush()
        mesh.abort("nobody hears this")
        assert mesh.ledger.total(axis="pp", collective="send", purpose="activations") == 24


@ranks(2)
def test_only_a_pipeline_has_mail() -> None:
    mesh = Mesh.from_world(Layout(dp=2))
    assert mesh.dp.mail is None and mesh.tp.mail is None and mesh.pp.mail is None
    dist.barrier()


@ranks(4)
@pytest.mark.parametrize("way", [MEMORY, GLOO])
def test_pipelines_beside_each_other_do_not_mix(way: str) -> None:
    """Two pipelines of two: ranks (0, 2) and (1, 3)."""
    mesh = Mesh.from_world(Layout(pp=2, dp=2), shared_memory=way == MEMORY)
    mail = mesh.pp.mail
    assert mail is not None and mail.size == 2 and mail.rank == rank() // 2
    mail.send([torch.tensor(rank())], 1 - mail.rank, channel="forward", purpose="test")
    (got,) = mail.post([meta(dtype=torch.int64)], 1 - mail.rank, channel="forward").wait()
    assert int(got) == (rank() + 2) % 4
    mail.flush()
    dist.barrier()


def test_a_rank_never_sends_to_a_neighbour_on_the_stream_on_which_it_receives_from_one() -> None:
    for size in range(2, 17):
        for me in range(size):
            neighbours = {(me - 1) % size, (me + 1) % size}
            sends = {stream_of("forward", me, peer) for peer in neighbours}
            receives = {stream_of("forward", peer, me) for peer in neighbours}
            assert not sends & receives


OVER_NCCL = """
import os, tempfile
import torch, torch.distributed as dist, torch.multiprocessing as mp
from lightning_dist.comm import Mesh
from lightning_dist.core.layout import Layout

def go(rank, store, eager):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(store, 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=device if eager else None)
    mail, peer = Mesh.from_world(Layout(pp=2), device).pp.mail, 1 - rank
    for k in range(20):  # all is sent before anything is received
        for channel in ("forward", "backward"):
            sent = [torch.full((1000 + k,), float(k + rank), device=device), torch.tensor(channel == "forward").cuda()]
            mail.send(sent, peer, channel=channel, purpose="test")
            sent[0].zero_()
        mail.send_object(k, peer)
    for channel in ("backward", "forward"):
        for k in range(20):
            like = [torch.empty(1000 + k, device="meta"), torch.empty((), dtype=torch.bool, device="meta")]
            got, flag = mail.post(like, peer, channel=channel).wait()
            assert got.device == device and torch.equal(got, torch.full_like(got, float(k + peer)))
            assert bool(flag) == (channel == "forward")
    assert [mail.receive_object(peer) for _ in range(20)] == list(range(20))
    mail.flush()
    torch.cuda.synchronize()
    print("ARRIVED", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    for eager in (False, True):
        store = os.path.join(tempfile.mkdtemp(), "store")
        processes = [mp.get_context("spawn").Process(target=go, args=(r, store, eager)) for r in range(2)]
        [p.start() for p in processes]
        [p.join() for p in processes]
"""


@pytest.mark.gpu
def test_over_nccl() -> None:
    """With communicators that are made at first use, and at once."""
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a device for every rank")
    assert run_script(OVER_NCCL, timeout=300).output.count("ARRIVED") == 4
