"""Collectives over flat buffers, each as a function that starts it and returns a `Pending`.

The implementation is chosen by backend. Gloo sends point to point: an all-gather then needs no copy out of a
staging buffer, and a reduce-scatter becomes one exchange and a local sum. That sum runs in the dtype of the
output, in the order of ranks: bfloat16 gradients can travel as bfloat16 and still be added in float32, with the
same result wherever a chunk lies. Other backends use their own ring collectives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.core.errors import PeerLostError

# Newer torch names these `*_single`; the older names warn there.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Waitable(Protocol):
    """What torch.distributed calls a Work."""

    def wait(self) -> object:
        """Block (CPU) or order the current stream (CUDA) until the transfer is done."""

    def is_completed(self) -> bool:
        """Whether it is known to be done."""


@dataclass
class Pending:
    """A collective under way. `wait` finishes it once; further calls do nothing."""

    works: Sequence[Waitable] = ()
    finish: Callable[[], None] | None = None
    done: bool = field(default=False, init=False)

    def wait(self) -> None:
        """Complete the transfer and what has to be computed from it."""
        if self.done:
            return
        self.done = True
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise PeerLostError("stops in a collective: another rank failed or died (see its own traceback)") from error
        if self.finish is not None:
            self.finish()


def all_gather(flat: Tensor, *, group: dist.ProcessGroup, p2p: bool) -> Pending:
    """Fill every chunk of `flat` (N * S elements) with that of the rank which owns it, in place.

    Chunk r = ``flat[r * S : (r + 1) * S]`` must hold the values of rank r when it is called there.
    """
    n, me = group.size(), group.rank()
    chunks = flat.chunk(n)
    if not p2p:
        return Pending([started(all_gather_single(flat, chunks[me], group=group, async_op=True))])
    works = []
    for peer in range(n):
        if peer != me:
            works.append(started(dist.isend(chunks[me], group=group, group_dst=peer)))
            works.append(started(dist.irecv(chunks[peer], group=group, group_src=peer)))
    return Pending(works)


def reduce_scatter(
    flat: Tensor, out: Tensor, *, group: dist.ProcessGroup, p2p: bool, scale: float, staging: Tensor | None, add: bool
) -> Pending:
    """``out (+)= scale * sum over ranks of chunk me``; `flat` has N * S elements, `out` S.

    Args:
        staging: (N - 1) * S elements of `flat`'s dtype to receive into (point-to-point backends only).
        add: add to `out` in place of overwriting it.
    """
    n, me = group.size(), group.rank()
    chunks = flat.chunk(n)
    if not p2p:
        reduced = out if not add and out.dtype == flat.dtype else torch.empty_like(chunks[me])
        work = started(reduce_scatter_single(reduced, flat, group=group, async_op=True))

        def deliver() -> None:
            if reduced is out:
                out.mul_(scale)
            elif add:
                out.add_(reduced, alpha=scale)
            else:
                out.copy_(reduced).mul_(scale)

        return Pending([work], deliver)
    assert staging is not None
    received = list(staging.chunk(n - 1))
    received.insert(me, chunks[me])
    works = []
    for peer in range(n):
        if peer != me:
            works.append(started(dist.isend(chunks[peer], group=group, group_dst=peer)))
            works.append(started(dist.irecv(received[peer], group=group, group_src=peer)))

    def total() -> None:
        if add:
            out.add_(received[0], alpha=scale)
        else:
            torch.mul(received[0], scale, out=out) if out.dtype == flat.dtype else out.copy_(received[0]).mul_(scale)
        for chunk in received[1:]:
            out.add_(chunk, alpha=scale)

    return Pending(works, total)


def all_reduce(flat: Tensor, *, group: dist.ProcessGroup, scale: float) -> Pending:
    """``flat = scale * sum over ranks``, in place."""
    work = started(dist.all_reduce(flat, group=group, async_op=True))
    return Pending([work], lambda: _scale(flat, scale))


def _scale(flat: Tensor, scale: float) -> None:
    if scale != 1.0:
        flat.mul_(scale)


def started(work: object) -> Waitable:
    """What a call has started: torch types it as Optional; None only comes back when this rank is outside the group."""
    assert work is not None
    return cast(Waitable, work)
