"""Memory that a process shares with its neighbours: without names, so that nothing is left behind.

A segment is an anonymous file in memory (`memfd_create`) whose handle is passed to the others through a socket. It has
no entry in any folder, so no death of a process leaves one; it is not counted against the size of ``/dev/shm``, which
containers keep small; and it lives for as long as anyone has it mapped, or its handle is on its way. Its pages come
when they are first written.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALIGNMENT = 64
SMALLEST = 1 << 16


def new_handle(num_bytes: int) -> int:
    """A new segment, of zeros."""
    handle = os.memfd_create("lightning_dist")
    os.ftruncate(handle, num_bytes)
    return handle


def mapped(handle: int) -> Tensor:
    """The segment behind a handle, as bytes. The handle is closed: the mapping keeps the segment."""
    try:
        return torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=os.fstat(handle).st_size, dtype=torch.uint8)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Place:
    """Where something lies: bytes [start, stop) of segment number `segment` of an arena."""

    segment: int
    start: int
    stop: int


@dataclass(eq=False)
class Arena:
    """Segments of one process. Places are lent from the lowest free one; where none is left, a segment is added.

    So lending never waits for anyone, and memory grows to what is lent at once, no further. `announce` is called with
    the handle of every new segment, before anything is put there.
    """

    announce: Callable[[int], None]
    segments: list[Tensor] = field(default_factory=list)
    lent: dict[int, Place] = field(default_factory=dict)

    def lend(self, number: int, num_bytes: int) -> tuple[Place, Tensor]:
        """A place of so many bytes until `take_back` has passed `number`, and the bytes."""
        place = self._free_place(num_bytes)
        if place is None:
            handle = new_handle(max(SMALLEST, 1 << (_aligned(num_bytes) - 1).bit_length()))
            self.announce(handle)
            self.segments.append(mapped(handle))
            place = Place(len(self.segments) - 1, 0, num_bytes)
        self.lent[number] = place
        return place, self.segments[place.segment][place.start : place.stop]

    def _free_place(self, num_bytes: int) -> Place | None:
        for index, memory in enumerate(self.segments):
            start = 0
            for taken in sorted((p for p in self.lent.values() if p.segment == index), key=lambda p: p.start):
                if taken.start - start >= _aligned(num_bytes):
                    break
                start = max(start, _aligned(taken.stop))
            if start + num_bytes <= memory.numel():
                return Place(index, start, start + num_bytes)
        return None

    def take_back(self, number: int) -> None:
        """Everything lent under this number and those before it is free."""
        for old in [n for n in self.lent if n <= number]:
            del self.lent[old]


def _aligned(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
