"""Mail along the pipeline axis: order, memory, dtypes, failures and figures, through shared memory and over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_dist.comm import Mesh
from lightning_dist.comm.mail import Mail
from lightning_dist.comm.shared_mail import SharedCarrier
from lightning_dist.core.layout import Layout
from tests.harness import rank, ranks, world_size

carriers = pytest.mark.parametrize("shared", [True, False], ids=["memory", "gloo"])


def connect(shared: bool, timeout: float = 60.0) -> tuple[Mesh, Mail]:
    mesh = Mesh.from_world(Layout(pp=world_size()), shared_memory=shared, timeout=timeout)
    mail = mesh.pp.mail
    assert mail is not None and isinstance(mail.carrier, SharedCarrier) == shared
    return mesh, mail


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@ranks(2, 4)
@carriers
def test_messages_arrive_in_order_on_each_channel(shared: bool) -> None:
    """Every rank sends to every other on both channels, interleaved, before it receives anything."""
    mesh, mail = connect(shared)
    me, n, seen = rank(), world_size(), 0
    peers = [peer for peer in range(n) if peer != me]
    for k in range(20):
        for peer in peers:
            for sign, channel in ((1, "forward"), (-1, "backward")):
                tensor = torch.full((k, 3), float(sign * (100 * me + k)))
                mail.send([tensor, torch.tensor(k)], peer, channel=channel, purpose="test")
                tensor.zero_()
            mail.send_object({"number": k, "from": me}, peer)
    for peer in peers:
        for sign, channel in ((-1, "backward"), (1, "forward")):
            like = [
                [torch.empty(k, 3, device="meta"), torch.empty((), dtype=torch.int64, device="meta")] for k in range(20)
            ]
            letters = [mail.post(one, peer, channel=channel) for one in like]
            for k, letter in enumerate(letters):
                got, number = letter.wait()
                assert torch.equal(got, torch.full((k, 3), float(sign * (100 * peer + k)))) and number == k
                seen += 1
        for k in range(20):
            assert mail.receive_object(peer) == {"number": k, "from": peer}
    mail.flush()
    assert seen == 40 * (n - 1)
    sent = sum(k * 12 + 8 for k in range(20)) * 2 * (n - 1)
    assert mesh.ledger.total(axis="pp", collective="send", purpose="test") == sent
    dist.barrier()
