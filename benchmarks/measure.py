"""What a worker can say about itself, and how numbers of many rounds become one.

Each quantity is read where nothing else can leak into it:

- *Bytes sent*: the kernel counts, per TCP socket, the payload bytes it has sent (``tcpi_bytes_sent``). The
  sum over a process's own sockets is exactly what its collectives put on the wire, without headers and the
  traffic of others on the loopback device. gloo moves everything through TCP, also within one machine.
- *Page faults and CPU time*: ``getrusage`` of the process, all its threads.
- *Memory in use*: glibc knows how many bytes are allocated at this moment (``mallinfo2``), tensors and C++ buffers
  of every thread included, free blocks excluded. The growth since just before the model was built is what training
  holds; a thread that reads it every millisecond during warm-up finds the peak. (torch's profiler counts too
  much here: it misses releases on gloo's threads, where the last owner of a gathered buffer may live.) What a system
  shares with other processes lies outside of the heap and is added: the arenas of this rank, which only grow.
- *Resident memory*: ``VmHWM``, the kernel's own high-water mark, set back to the present level after warm-up.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import socket
import statistics
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

# Offset of the 64-bit field tcpi_bytes_sent in Linux's struct tcp_info, where it is since kernel 4.19.
_TCPI_BYTES_SENT = 200


def tcp_bytes_sent() -> int | None:
    """Payload bytes sent so far by this process's TCP sockets, or None where the kernel does not tell."""
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return None
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as duplicate:
                info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # not TCP, or closed since the listing
            continue
        if len(info) < _TCPI_BYTES_SENT + 8:
            return None
        total += int(struct.unpack_from("=Q", info, _TCPI_BYTES_SENT)[0])
    return total


@dataclass(frozen=True)
class Usage:
    """Counters of one process; subtract two readings."""

    page_faults: int
    cpu_seconds: float
    bytes_sent: int | None

    @classmethod
    def now(cls) -> Usage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(used.ru_minflt + used.ru_majflt, used.ru_utime + used.ru_stime, tcp_bytes_sent())

    def __sub__(self, earlier: Usage) -> Usage:
        both = self.bytes_sent is not None and earlier.bytes_sent is not None
        sent = (self.bytes_sent or 0) - (earlier.bytes_sent or 0) if both else None
        return Usage(self.page_faults - earlier.page_faults, self.cpu_seconds - earlier.cpu_seconds, sent)


def peak_resident_bytes() -> int:
    """High-water mark of the resident set since the process began or since it was last set back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_resident() -> None:
    """Start a new high-water mark at the present level; where the kernel has no such thing, keep the old."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@dataclass(frozen=True)
class Memory:
    """Bytes in use beyond what the process had before its model: between steps, and at most within one.

    `shared` is the part of both that lies in memory shared with other processes.
    """

    held: int
    peak: int
    shared: int


class MemoryMeter:
    """What is allocated now, relative to when the meter was made, and the process's share of shared memory.

    `shared_bytes` may be set once there is something that knows.
    """

    def __init__(self) -> None:
        self.shared_bytes: Callable[[], int] = lambda: 0
        self._mallinfo: Callable[[], _MallInfo] | None = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self._mallinfo is not None:
            self._mallinfo.restype = _MallInfo
        gc.collect()
        self._base = self._allocated()

    def _allocated(self) -> int:
        if self._mallinfo is None:
            return 0
        info = self._mallinfo()
        return int(info.uordblks + info.hblkhd)  # blocks inside the heaps, and those mapped one by one

    def now(self) -> int:
        """Bytes in use since the meter was made."""
        return self._allocated() - self._base + self.shared_bytes()

    def watch(self, work: Callable[[], object]) -> Memory | None:
        """Run `work` and return its peak and the level after it; None where the C library is not glibc."""
        peak, over = self.now(), threading.Event()

        def sample() -> None:
            nonlocal peak
            while not over.wait(0.001):
                peak = max(peak, self.now())

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        try:
            work()
        finally:
            over.set()
            sampler.join()
        held = self.now()
        return None if self._mallinfo is None else Memory(held, max(peak, held), self.shared_bytes())


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a small sample."""

    median: float
    q1: float
    q3: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            raise ValueError("no values to summarize")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3, len(values))


def busy_cpu_seconds() -> float | None:
    """CPU seconds that all processes of the machine have used, steal time included."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
