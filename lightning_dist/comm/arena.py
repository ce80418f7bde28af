"""Memory that a process shares with its neighbours: without names, so that nothing is left behind.

A segment is an anonymous file in memory (`memfd_create`) whose handle is passed to the others through a socket. It has
no entry in any folder, so no death of a process leaves one; it is not counted against the size of ``/dev/shm``, which
containers keep small; and it lives for as long as anyone has it mapped, or its handle is on its way. Its pages come
when they are first written.
"""

import os
from bisect import insort
from collections.abc import Callable, Hashable
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

    So lending never waits for anyone. A new segment is as large as all before it together, so there are few, but its
    pages come only with use: memory grows to what is lent at once, no further. `announce` is called with the handle of
    every new segment, before anything is put there.
    """

    announce: Callable[[int], None]
    segments: list[Tensor] = field(default_factory=list)
    lent: dict[Hashable, Place] = field(default_factory=dict)
    taken: list[list[tuple[int, int]]] = field(default_factory=list)  # of each segment, in order
    written: list[int] = field(default_factory=list)  # of each segment, up to where it was ever lent

    def lend(self, name: Hashable, num_bytes: int) -> Place:
        """A place of so many bytes until `take_back`."""
        need = aligned(num_bytes)
        segment, start = self._free_place(need)
        if segment == len(self.segments):
            handle = new_handle(max(SMALLEST, 1 << (need - 1).bit_length(), self.num_bytes))
            self.announce(handle)
            self.segments.append(mapped(handle))
            self.taken.append([])
            self.written.append(0)
        insort(self.taken[segment], (start, start + need))
        self.lent[name] = place = Place(segment, start, start + num_bytes)
        self.written[segment] = max(self.written[segment], place.stop)
        return place

    @property
    def num_bytes(self) -> int:
        """Size of all segments, with and without pages."""
        return sum(segment.numel() for segment in self.segments)

    @property
    def written_bytes(self) -> int:
        """How much of that has pages, to be exact within one per segment; it stays for as long as the arena."""
        return sum(self.written)

    def _free_place(self, need: int) -> tuple[int, int]:
        """Segment and start; the segment after the last where none has room."""
        for segment, taken in enumerate(self.taken):
            free = 0
            for start, stop in taken:
                if start - free >= need:
                    return segment, free
                free = stop
            if free + need <= self.segments[segment].numel():
                return segment, free
        return len(self.segments), 0

    def take_back(self, name: Hashable) -> None:
        """What was lent under this name is free."""
        place = self.lent.pop(name)
        self.taken[place.segment].remove((place.start, place.start + aligned(place.stop - place.start)))


def aligned(num_bytes: int) -> int:
    """So many bytes and those that are left free after them."""
    return -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
