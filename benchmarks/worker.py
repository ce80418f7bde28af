"""One rank of one system, alive for the whole run and idle except when told to take steps.

parent                         rank (one of two per system)
  |  -- start ------------->   import, join the group (file store), build, warm up
  |  <------ Ready | Failed
  |  -- Turn(steps=2) ----->   barrier, clock, steps, clock
  |  <---- TurnReport
  |        ...                 between turns: blocked in a read of the pipe, no CPU used
  |  -- None -------------->   leave
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from benchmarks.measure import (
    Memory,
    MemoryMeter,
    Usage,
    peak_resident_bytes,
    reset_peak_resident,
)
from benchmarks.systems import SYSTEMS, Training
from benchmarks.workload import Job, TokenStream, build_model

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Assignment:
    """Which rank of which system a process plays, and where to meet the other."""

    system: str
    job: Job
    rank: int
    store: str
    log: str
    warmup: int


@dataclass(frozen=True)
class Ready:
    """Sent once after warm-up."""

    memory: Memory | None
    start_peak_resident: int
    losses: list[float]


@dataclass(frozen=True)
class Failed:
    """The system cannot run: `missing` if its imports failed, otherwise it broke while working."""

    reason: str
    missing: bool


@dataclass(frozen=True)
class Turn:
    """Take this many steps now."""

    steps: int


@dataclass(frozen=True)
class TurnReport:
    """What one rank saw in one turn."""

    seconds: float
    usage: Usage
    ledger_bytes: int | None
    losses: list[float]
    peak_resident: int


def serve(connection: Connection, assignment: Assignment) -> None:
    """Entry point of the process."""
    _redirect_output(assignment.log)
    system = SYSTEMS[assignment.system]
    try:
        _enter_environment(assignment)
        try:
            system.require()
        except Exception as error:
            traceback.print_exc()
            connection.send(Failed(_one_line(error), missing=True))
            return
        _Rank(assignment).take_turns(connection)
    except EOFError:  # the parent is gone
        return
    except Exception as error:
        traceback.print_exc()
        connection.send(Failed(_one_line(error), missing=False))


class _Rank:
    """A member of the group with its stream of batches."""

    def __init__(self, assignment: Assignment) -> None:
        import torch
        import torch.distributed as dist

        self._assignment = assignment
        self._job = assignment.job
        torch.set_num_threads(1)
        store = dist.FileStore(assignment.store, self._job.world_size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=assignment.rank, world_size=self._job.world_size)
        self._barrier: Callable[[], None] = dist.barrier
        self._leave: Callable[[], None] = dist.destroy_process_group
        whole_batch = SYSTEMS[assignment.system].whole_batch
        self._stream = TokenStream(self._job, None if whole_batch else assignment.rank)
        self._steps_taken = 0

    def _batches(self, steps: int) -> list[Tensor]:
        start, self._steps_taken = self._steps_taken, self._steps_taken + steps
        return [self._stream.batch(step) for step in range(start, self._steps_taken)]

    def take_turns(self, connection: Connection) -> None:
        """Warm up, then take turns until told to leave."""
        first, *steady = self._batches(self._assignment.warmup)
        meter = MemoryMeter()
        training = SYSTEMS[self._assignment.system].prepare(build_model(self._job), self._job)
        meter.shared_bytes = training.shared_bytes
        losses = [training.step(first)]  # allocates what stays: optimizer state, buffers
        memory = meter.watch(lambda: losses.extend(training.step(batch) for batch in steady))
        start_peak = peak_resident_bytes()
        reset_peak_resident()
        connection.send(Ready(memory, start_peak, [loss.item() for loss in losses]))
        while (turn := connection.recv()) is not None:
            connection.send(self._turn(training, turn.steps))
        self._leave()

    def _turn(self, training: Training, steps: int) -> TurnReport:
        batches = self._batches(steps)
        ledger = training.ledger_bytes or (lambda: 0)
        self._barrier()
        before, booked, clock = Usage.now(), ledger(), time.perf_counter()
        losses = [training.step(batch) for batch in batches]
        seconds = time.perf_counter() - clock
        self._barrier()  # what the peer has yet to receive counts as sent only now
        usage = Usage.now() - before
        return TurnReport(
            seconds=seconds,
            usage=usage,
            ledger_bytes=ledger() - booked if training.ledger_bytes else None,
            losses=[loss.item() for loss in losses],
            peak_resident=peak_resident_bytes(),
        )


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _enter_environment(assignment: Assignment) -> None:
    """What a launcher would have set; DeepSpeed reads LOCAL_SIZE as the number of CPU devices."""
    os.environ.update(
        RANK=str(assignment.rank),
        LOCAL_RANK=str(assignment.rank),
        WORLD_SIZE=str(assignment.job.world_size),
        LOCAL_SIZE=str(assignment.job.world_size),
        LOCAL_WORLD_SIZE=str(assignment.job.world_size),
        DS_ACCELERATOR="cpu",
    )


def _one_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]
