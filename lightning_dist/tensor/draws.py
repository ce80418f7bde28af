"""Random numbers under tensor parallelism: alike where tensors are whole, different where they are divided.

All ranks of an axis follow one random stream, so a dropout on a tensor that all hold masks the same elements
everywhere. For a divided tensor every rank needs numbers of its own. They are drawn from a generator that is seeded by
one number of the common stream and the rank: the common stream advances alike everywhere, and activation recompute,
which restores the common stream, gets the same numbers again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_dist.comm.mesh import Axis


@contextmanager
def local_draws(axis: Axis, device: torch.device) -> Iterator[None]:
    """Inside the block, `device` draws random numbers that differ from rank to rank."""
    seed = (int(torch.empty((), dtype=torch.int64).random_()) * 1_000_003 + axis.rank) % 2**63
    if device.type == "cpu":
        common = torch.random.get_rng_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.random.set_rng_state(common)
        return
    with torch.random.fork_rng([device], device_type=device.type):
        torch.get_device_module(device).manual_seed(seed)
        yield
