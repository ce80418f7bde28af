"""Buffers follow rank 0, as under DDP.

Batch statistics drift apart when every rank sees other data. DDP broadcasts rank 0's buffers before a forward
whenever the last backward was reduced; the same rule holds here, for the buffers that a state dict contains (what
is not saved, such as rotary tables, is computed alike everywhere). One broadcast per dtype.

In a pipeline a buffer is right where its module is computed, and old on the other stages, which do not read it. They
get it when somebody looks: inside `gathered`.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.comm.mesh import Axis, Mesh
from lightning_dist.comm.rollcall import Place, RollCall
from lightning_dist.core.shard import Home, home_of


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


@dataclass(frozen=True)
class _Slot:
    """A place for a buffer in a module that not all stages compute."""

    module: nn.Module
    key: str
    home: Home

    @property
    def buffer(self) -> Tensor | None:
        """What is there."""
        return self.module._buffers[self.key]

    def put(self, values: Tensor | None) -> None:
        """In place, so that whoever holds the buffer sees it, where it has the same shape."""
        mine = self.buffer
        if mine is None or values is None or mine.is_inference() or _form(mine) != _form(values):
            self.module._buffers[self.key] = values
        else:
            with torch.no_grad():
                mine.copy_(values)


@dataclass(eq=False)
class HomeBuffers:
    """Brings buffers from the stages that compute their modules to the others; what has changed since the last time."""

    stages: Axis
    rollcall: RollCall
    device: torch.device
    seen: dict[tuple[nn.Module, str], object] = field(default_factory=dict)

    def spread(self, module: nn.Module) -> None:
        """Make the buffers of `module` on all stages what they are at home; collective."""
        slots = [
            _Slot(part, key, home)
            for part in module.modules()
            if (home := home_of(part)) is not None
            for key in part._buffers
        ]
        if self.stages.size == 1 or not slots:
            return
        said: list[Any] = self.rollcall.exchange([self._say(slot) for slot in slots])
        mates = [said[rank] for rank in self.stages.ranks]
        everywhere = [any(answers[number][0] for answers in said) for number in range(len(slots))]
        for slot, forms, changed in zip(slots, zip(*mates, strict=True), everywhere, strict=True):
            if changed:
                self._bring(slot, forms[slot.home.first][1])
                self.seen[slot.module, slot.key] = _mark(slot.buffer)

    def _say(self, slot: _Slot) -> tuple[bool, tuple[torch.Size, torch.dtype] | None]:
        """Whether a buffer has changed, and its form."""
        buffer = slot.buffer
        changed = self.seen.get((slot.module, slot.key), _NEVER) != _mark(buffer)
        return changed, None if buffer is None else _form(buffer)

    def _bring(self, slot: _Slot, form: tuple[torch.Size, torch.dtype] | None) -> None:
        if form is None:
            slot.put(None)
            return
        shape, dtype = form
        speaks = self.stages.rank == slot.home.first
        values = slot.buffer if speaks else torch.empty(shape, dtype=dtype, device=self.device)
        assert values is not None
        flat = values.detach().contiguous().view(-1)
        self.stages.broadcast(flat.view(torch.uint8), purpose="buffers", source=slot.home.first)
        if not speaks:
            slot.put(flat.view(shape))


_NEVER = object()


def _form(buffer: Tensor) -> tuple[torch.Size, torch.dtype]:
    return buffer.shape, buffer.dtype


def _mark(buffer: Tensor | None) -> object:
    """Another one for other values. Their version does not tell: batch and instance norms write without counting it."""
    if buffer is None:
        return None
    values = buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return *_form(buffer), hashlib.blake2b(values.numpy().data, digest_size=16).digest()
