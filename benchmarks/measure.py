"""What a worker can say about itself, and how numbers of many rounds become one.

Each quantity is read where nothing else can leak into it:

- *Bytes sent*: the kernel counts, per TCP socket, the payload bytes it has sent (``tcpi_bytes_sent``). The
  sum over a process's own sockets is exactly what its collectives put on the wire, without headers and the
  traffic of others on the loopback device. gloo moves everything through TCP, also within one machine.
- *Page faults and CPU time*: ``getrusage`` of the process, all its threads.
- *Tensor memory*: torch's profiler reports every allocation and release of the CPU allocator. Recorded from
  before the model exists, their running sum is the number of bytes held by tensors (C++ buffers included) at
  any time; its level at the end of a step is what persists, its maximum within the step is the peak.
- *Resident memory*: ``VmHWM``, the kernel's own high-water mark, set back to the present level after warm-up.
"""

from __future__ import annotations

import os
import resource
import socket
import statistics
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

# Offset of the 64-bit field tcpi_bytes_sent in Linux's struct tcp_info, where it is since kernel 4.19.
_TCPI_BYTES_SENT = 200
_STEADY = "benchmark: steady step"


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


@dataclass(frozen=True)
class TensorMemory:
    """Bytes of the CPU allocator: held between steps, and at most within a step."""

    persistent: int
    peak: int


class AllocationTrace:
    """Follow the CPU allocator through torch's profiler; open it before the model is built.

    The profiler costs time, so a trace belongs into warm-up, never into a timed step.
    """

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> AllocationTrace:
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    @contextmanager
    def steady_step(self) -> Iterator[None]:
        """Mark the step whose peak counts: the last one traced."""
        from torch.profiler import record_function

        with record_function(_STEADY):
            yield

    def result(self) -> TensorMemory | None:
        """Running sum of all allocations: its last level inside the marked step, and its maximum there."""
        profiler: Any = self._profile.profiler
        if profiler is None or profiler.kineto_results is None:
            return None
        events = list(profiler.kineto_results.events())
        marks = [event for event in events if event.name() == _STEADY]
        if not marks:
            return None
        start, end = marks[-1].start_ns(), marks[-1].start_ns() + marks[-1].duration_ns()
        changes = sorted(
            ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
            key=lambda change: change[0],
        )
        level = peak = persistent = 0
        for when, nbytes in changes:
            if when > end:
                break
            if when >= start:
                peak = max(peak, level)
            level += nbytes
            persistent = level
        return TensorMemory(persistent=persistent, peak=max(peak, level))


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
