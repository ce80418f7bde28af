"""Buffers follow rank 0, as under DDP.

Batch statistics drift apart when every rank sees other data. DDP broadcasts rank 0's buffers before a forward
whenever the last backward was reduced; the same rule holds here, for the buffers that a state dict contains (what
is not saved, such as rotary tables, is computed alike everywhere). One broadcast per dtype.
"""

import torch
from torch import Tensor, nn

from lightning_dist.comm.mesh import Mesh
from lightning_dist.comm.rollcall import Place


class BufferSync:
    """Broadcasts persistent buffers when they may have drifted apart (`stale`)."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self.axis, self.rollcall = mesh.dp, mesh.rollcall
        self.module = module
        self.stale = True

    def sync(self) -> None:
        """Make buffers equal to rank 0's, if the last step has changed them; collective."""
        if not self.stale:
            return
        self.stale = False
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in persistent_buffers(self.module):
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        if self.axis.size == 1 or not by_dtype:
            return
        self.rollcall.call(Place.BUFFERS)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self.axis.broadcast(flat, purpose="buffers")
            for buffer, values in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))


def persistent_buffers(module: nn.Module) -> list[Tensor]:
    """The buffers that a state dict contains, each once."""
    found: dict[int, Tensor] = {}
    for sub in module.modules():
        for name, buffer in sub.named_buffers(recurse=False):
            if name not in sub._non_persistent_buffers_set:
                found[id(buffer)] = buffer
    return list(found.values())
