"""The parent's side of a system: its processes, started together, told to take turns.

A system may break in any way: raise on one rank while the other waits for it in a collective, be killed for
memory, or hang. Each ends as a reason in the table, and the others go on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from benchmarks.measure import busy_cpu_seconds
from benchmarks.worker import Assignment, Failed, Ready, Turn, TurnReport, serve
from benchmarks.workload import Job

Answer = TypeVar("Answer", Ready, TurnReport)

# Read when a process starts, so the parent sets them for its children; the parent itself ignores them.
WORKER_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
# glibc then neither maps large blocks one by one nor gives them back: a buffer made again costs no fault.
KEEP_MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**40)}


class SystemFailed(Exception):
    """The system is out of the run; the message is the reason for people."""


@dataclass
class TurnResult:
    """One turn of one system: time and memory of the worst rank, means over ranks of the rest."""

    seconds_per_step: float
    cpu_seconds_per_step: float
    faults_per_step: float
    bytes_sent_per_step: float | None
    ledger_bytes_per_step: float | None
    losses: list[float]
    peak_resident: int
    foreign_load: float | None


@dataclass
class Pair:
    """All ranks of one system."""

    system: str
    job: Job
    directory: Path
    warmup: int
    timeout: float
    losses: list[float] = field(default_factory=list)
    _processes: list[BaseProcess] = field(default_factory=list)
    _connections: list[Connection] = field(default_factory=list)

    def start(self) -> list[Ready]:
        """Start the ranks and wait until all have warmed up.

        Raises:
            SystemFailed: an import, the setup or the warm-up failed, or took longer than the timeout.
        """
        self._launch()
        answers = self._collect(Ready)
        self.losses += _mean_losses([answer.losses for answer in answers])
        return answers

    def _launch(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = str(self.directory / f"{self.system}.store")
        for rank in range(self.job.world_size):
            ours, theirs = context.Pipe()
            log = str(self._log(rank))
            assignment = Assignment(self.system, self.job, rank, store, log, self.warmup)
            process = context.Process(target=serve, args=(theirs, assignment), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def turn(self, steps: int) -> TurnResult:
        """Let all ranks take `steps` steps while everybody else waits."""
        began, busy = time.perf_counter(), busy_cpu_seconds()
        try:
            for connection in self._connections:
                connection.send(Turn(steps))
        except OSError as error:
            raise self._fail(f"a rank is gone ({error})") from error
        reports = self._collect(TurnReport)
        elapsed = time.perf_counter() - began
        foreign = None
        if busy is not None and (busy_after := busy_cpu_seconds()) is not None:
            mine = sum(report.usage.cpu_seconds for report in reports)
            foreign = max(0.0, busy_after - busy - mine) / (elapsed * (os.cpu_count() or 1))
        sent = [report.usage.bytes_sent for report in reports if report.usage.bytes_sent is not None]
        ledger = [report.ledger_bytes for report in reports if report.ledger_bytes is not None]
        per_step = 1.0 / steps
        per_rank_step = per_step / len(reports)
        losses = _mean_losses([report.losses for report in reports])
        self.losses += losses
        return TurnResult(
            seconds_per_step=max(report.seconds for report in reports) * per_step,
            cpu_seconds_per_step=sum(report.usage.cpu_seconds for report in reports) * per_rank_step,
            faults_per_step=sum(report.usage.page_faults for report in reports) * per_rank_step,
            bytes_sent_per_step=sum(sent) * per_rank_step if len(sent) == len(reports) else None,
            ledger_bytes_per_step=sum(ledger) * per_rank_step if len(ledger) == len(reports) else None,
            losses=losses,
            peak_resident=max(report.peak_resident for report in reports),
            foreign_load=foreign,
        )

    def stop(self) -> None:
        """End all ranks, politely first."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + 10
        for process in self._processes:
            process.join(max(0.1, deadline - time.monotonic()))
        self._kill()

    def _collect(self, kind: type[Answer]) -> list[Answer]:
        """One answer of each rank; the first failure ends the system, since its peers would wait forever."""
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < len(self._connections):
            open_ranks = {c: rank for rank, c in enumerate(self._connections) if rank not in answers}
            ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._fail(f"no answer within {self.timeout:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = open_ranks[connection]
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    raise self._fail(f"rank {rank} ended with exit code {code}") from None
                if isinstance(answer, Failed):
                    raise self._fail(("not available: " if answer.missing else "") + answer.reason)
                assert isinstance(answer, kind)
                answers[rank] = answer
        return [answers[rank] for rank in sorted(answers)]

    def _fail(self, reason: str) -> SystemFailed:
        self._kill()
        return SystemFailed(reason)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
                process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._processes.clear()

    def log_tail(self, lines: int = 15) -> str:
        """The last lines that rank 0 printed, for people who ask why."""
        path = self._log(0)
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def _log(self, rank: int) -> Path:
        return self.directory / f"{self.system}.{rank}.log"


def _mean_losses(per_rank: list[list[float]]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*per_rank, strict=True)]
