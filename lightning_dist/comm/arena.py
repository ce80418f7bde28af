"""Memory that a process lends to others of its machine: without names, so that nothing is left behind.

A segment is an anonymous file in memory (`memfd_create`); others of the same user map it by way of
``/proc/<pid>/fd/<handle>``. It has no entry in any folder, so no death of a process leaves one, and it is not counted
against the size of ``/dev/shm``, which containers keep small. Its pages come when they are first written.
"""

import os
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALIGNMENT = 64
SMALLEST = 1 << 16


@dataclass(frozen=True)
class Segment:
    """Bytes in shared memory, and the handle by which other processes find them."""

    handle: int
    memory: Tensor

    @classmethod
    def create(cls, num_bytes: int) -> "Segment":
        """A new one, of zeros."""
        handle = os.memfd_create("lightning_dist")
        os.ftruncate(handle, num_bytes)
        return cls(handle, mapped(os.getpid(), handle, num_bytes))


def mapped(pid: int, handle: int, num_bytes: int) -> Tensor:
    """A segment of process `pid`, as bytes.

    Raises:
        OSError, RuntimeError: it is gone with its process, or this user may not see it.
    """
    path = f"/proc/{pid}/fd/{handle}"
    os.stat(path)  # torch would make a file that does not exist
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


@dataclass(frozen=True)
class Place:
    """Where something lies: bytes [start, stop) of a segment."""

    segment: Segment
    start: int
    stop: int

    @property
    def memory(self) -> Tensor:
        """The bytes."""
        return self.segment.memory[self.start : self.stop]


@dataclass(eq=False)
class Arena:
    """Segments of one process. Places are lent from the lowest free one; where none is left, a segment is added.

    So lending never waits for anyone, and memory grows to what is lent at once, no further.
    """

    segments: list[Segment] = field(default_factory=list)
    lent: dict[int, Place] = field(default_factory=dict)

    def lend(self, number: int, num_bytes: int) -> Place:
        """A place of so many bytes, until `take_back` has passed `number`."""
        room = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        for segment in self.segments:
            start = 0
            for taken in sorted((p for p in self.lent.values() if p.segment is segment), key=lambda p: p.start):
                if taken.start - start >= room:
                    break
                start = max(start, -(-taken.stop // ALIGNMENT) * ALIGNMENT)
            if start + room <= segment.memory.numel():
                return self._note(number, Place(segment, start, start + num_bytes))
        segment = Segment.create(max(SMALLEST, 1 << (room - 1).bit_length()))
        weakref.finalize(self, os.close, segment.handle)
        self.segments.append(segment)
        return self._note(number, Place(segment, 0, num_bytes))

    def _note(self, number: int, place: Place) -> Place:
        self.lent[number] = place
        return place

    def take_back(self, number: int) -> None:
        """Everything lent under this number and those before it is free."""
        for old in [n for n in self.lent if n <= number]:
            del self.lent[old]
