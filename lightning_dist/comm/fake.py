"""A fake world: one process plays one rank of a large world; collectives return at once and move nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Make this process rank `rank` of `size` imaginary ranks while the block runs.

    The ledger, the memory and the shapes are those of a real run; the numbers are not.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
