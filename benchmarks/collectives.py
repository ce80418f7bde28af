"""Collectives of lightning_dist through the memory of one machine beside the same through gloo, in one interleaved run.

    python benchmarks/collectives.py                 # 2 and 4 ranks, 16 bytes to 16 MB
    python benchmarks/collectives.py --quick         # a smoke run

Every rank has two meshes, one of them without shared memory, and asks the same of both in turn: first the one, in the
next round the other. A measurement is a number of calls one after the other, between barriers, and its time is that of
the slowest rank. Ratios pair the two measurements of a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a file: let the package be found from the root of the project instead
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.measure import Spread, busy_cpu_seconds
from benchmarks.pairs import WORKER_ENVIRONMENT

if TYPE_CHECKING:
    from lightning_dist.comm import Mesh

ROOT = Path(__file__).resolve().parent.parent
TITLE = "Collectives through shared memory and gloo"
SIZES = (16, 256, 4096, 65_536, 524_288, 2_097_152, 16_777_216)
ROLL_CALL = 16
"""What a rank says at a roll call, in bytes; it has no other size."""
BYTES_OF_A_MEASUREMENT, MOST_CALLS, FEWEST_CALLS = 32 << 20, 200, 3
CARRIERS = ("gloo", "shared memory")


@dataclass(frozen=True)
class Task:
    """One row: a collective over a whole tensor of so many bytes (float32)."""

    collective: str
    num_bytes: int

    @property
    def calls(self) -> int:
        """How many make a measurement."""
        return min(MOST_CALLS, max(FEWEST_CALLS, BYTES_OF_A_MEASUREMENT // self.num_bytes))


@dataclass(frozen=True)
class Assignment:
    """What one process does: which rank it is, where the others are, and in how many rounds to measure what."""

    rank: int
    world_size: int
    store: str
    tasks: tuple[Task, ...]
    rounds: int
    seed: int


@dataclass(frozen=True)
class Measured:
    """By task and carrier, seconds per call in each round; and the CPU time of the process."""

    seconds: dict[tuple[Task, str], list[float]]
    cpu_seconds: float


@dataclass(frozen=True)
class Row:
    """A row of the table: medians in microseconds, and what shared memory takes of gloo's time in the same round."""

    ranks: int
    collective: str
    num_bytes: int
    calls: int
    gloo: Spread
    shared: Spread
    ratio: Spread


def caller(mesh: Mesh, task: Task) -> Callable[[], object]:
    """The collective, done to its end, as a function without arguments."""
    import torch

    from lightning_dist.comm import Place

    axis = mesh.dp
    flat = torch.ones(max(task.num_bytes // 4, axis.size))
    out = torch.empty(flat.numel() // axis.size)
    calls: dict[str, Callable[[], object]] = {
        "roll call": lambda: mesh.rollcall.call(Place.BARRIER),
        "all-gather": lambda: axis.all_gather(flat, purpose="benchmark").wait(),
        "reduce-scatter": lambda: axis.reduce_scatter_mean(flat, out, purpose="benchmark").wait(),
        "all-reduce": lambda: axis.all_reduce_mean(flat, purpose="benchmark").wait(),
    }
    return calls[task.collective]


def all_tasks(sizes: Sequence[int]) -> tuple[Task, ...]:
    """The rows of the table, for one number of ranks."""
    names = ("all-gather", "reduce-scatter", "all-reduce")
    return (Task("roll call", ROLL_CALL), *(Task(name, size) for name in names for size in sizes))


def serve(connection: Connection, assignment: Assignment) -> None:
    """Entry point of a process: join the others, measure, say what was measured."""
    import torch
    import torch.distributed as dist

    from lightning_dist.comm import Mesh
    from lightning_dist.core.layout import Layout

    torch.set_num_threads(1)
    world = assignment.world_size
    store = dist.FileStore(assignment.store, world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=assignment.rank, world_size=world)
    meshes = {
        "gloo": Mesh.from_world(Layout(dp=world), shared_memory=False),
        "shared memory": Mesh.from_world(Layout(dp=world), timeout=300.0),
    }
    if not meshes["shared memory"].dp.shared:
        raise RuntimeError("these ranks cannot use shared memory (Linux on x86, one machine): nothing to compare")
    seconds: dict[tuple[Task, str], list[float]] = {(t, c): [] for t in assignment.tasks for c in CARRIERS}
    order = random.Random(assignment.seed)  # the same on all ranks
    for round_ in range(-1, assignment.rounds):  # the first one warms up
        for task in order.sample(assignment.tasks, len(assignment.tasks)):
            for carrier in CARRIERS if round_ % 2 else reversed(CARRIERS):
                call = caller(meshes[carrier], task)
                call()
                dist.barrier()
                began = time.perf_counter()
                for _ in range(task.calls):
                    call()
                taken = time.perf_counter() - began
                dist.barrier()
                if round_ >= 0:
                    seconds[task, carrier].append(taken / task.calls)
        if assignment.rank == 0:
            connection.send(round_)
    connection.send(Measured(seconds, time.process_time()))
    dist.destroy_process_group()


def measure(world_size: int, options: argparse.Namespace, console: Console) -> tuple[list[Row], float]:
    """All rows for one number of ranks, and the CPU seconds of its processes.

    Raises:
        RuntimeError: a process ended without an answer, or said nothing within the time limit.
    """
    tasks, context = all_tasks(options.sizes), get_context("spawn")
    answers: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        processes, connections = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            assignment = Assignment(rank, world_size, f"{directory}/store", tasks, options.rounds, options.seed)
            processes.append(context.Process(target=serve, args=(theirs, assignment), daemon=True))
            processes[-1].start()
            theirs.close()
            connections.append(ours)
        try:
            for rank, connection in enumerate(connections):
                while not isinstance(said := _next(connection, rank, options.timeout), Measured):
                    console.print(f"{world_size} ranks: round {said + 1} of {options.rounds}", highlight=False)
                answers.append(said)
            for process in processes:
                process.join(10)
        finally:
            for process in processes:
                process.kill()
    return [_row(task, world_size, answers) for task in tasks], sum(answer.cpu_seconds for answer in answers)


def _next(connection: Connection, rank: int, timeout: float) -> Any:
    if not connection.poll(timeout):
        raise RuntimeError(f"rank {rank} has said nothing for {timeout:.0f} s")
    try:
        return connection.recv()
    except (EOFError, OSError):
        raise RuntimeError(f"rank {rank} ended without an answer (see its own traceback)") from None


def _row(task: Task, world_size: int, answers: Sequence[Measured]) -> Row:
    """The slowest rank of each round, and the ratios of the rounds."""
    slowest = {
        carrier: [max(times) for times in zip(*(answer.seconds[task, carrier] for answer in answers), strict=True)]
        for carrier in CARRIERS
    }
    gloo, shared = (slowest[carrier] for carrier in CARRIERS)
    ratios = [ours / theirs for ours, theirs in zip(shared, gloo, strict=True)]
    return Row(
        ranks=world_size,
        collective=task.collective,
        num_bytes=task.num_bytes,
        calls=task.calls,
        gloo=Spread.of([1e6 * value for value in gloo]),
        shared=Spread.of([1e6 * value for value in shared]),
        ratio=Spread.of(ratios),
    )


HEADERS = ("ranks", "collective", "bytes", "gloo µs", "shared memory µs", "shared memory / gloo", "quartiles")


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table in words."""
    return (
        str(row.ranks),
        row.collective,
        f"{row.num_bytes:,}",
        *(f"{spread.median:,.{1 if spread.median < 100 else 0}f}" for spread in (row.gloo, row.shared)),
        f"{row.ratio.median:.3f}",
        f"{row.ratio.q1:.3f} – {row.ratio.q3:.3f}",
    )


def markdown(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The table for a page."""
    lines = [
        f"# {facts['title']}",
        "",
        f"`{facts['command']}`",
        "",
        f"{facts['date']}, commit {facts['commit']}; {facts['hardware']['summary']}; "
        + ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        + ".",
        "",
        f"Bytes are those of the whole float32 tensor; a roll call says {ROLL_CALL} bytes a rank. Medians over "
        f"{facts['settings']['rounds']} rounds of the time of one call on the slowest rank, one thread each, and of "
        f"the ratios within a round. {facts['load']}",
        "",
        "| " + " | ".join(HEADERS) + " |",
        "|---:|---|" + "---:|" * (len(HEADERS) - 2),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    numbers = lambda text: tuple(int(number) for number in text.split(","))  # noqa: E731
    parser = argparse.ArgumentParser(prog="benchmarks/collectives.py", description=TITLE)
    option = parser.add_argument
    option("--quick", action="store_true", help="smoke run: 2 ranks, three sizes, three rounds")
    option("--ranks", type=numbers, default=None, help="numbers of processes, separated by commas (2,4; quick: 2)")
    option("--sizes", type=numbers, default=None, help="bytes of the whole tensors, separated by commas")
    option("--rounds", type=int, default=None, help="rounds (30; quick: 3)")
    option("--seed", type=int, default=0, help="of the order within a round (0)")
    option("--timeout", type=float, default=300.0, help="seconds that a start or a round may take (300)")
    option("--out", type=Path, default=None, help="path without suffix for the .json and .md")
    options = parser.parse_args(arguments)
    options.ranks = options.ranks or ((2,) if options.quick else (2, 4))
    options.sizes = options.sizes or ((16, 65_536, 2_097_152) if options.quick else SIZES)
    options.rounds = options.rounds or (3 if options.quick else 30)
    if min(options.ranks) < 2:
        parser.error("--ranks must be at least 2 each")
    if any(size % (4 * ranks) for size in options.sizes for ranks in options.ranks):
        parser.error("--sizes must be multiples of 4 bytes for each rank")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison from the command line; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    os.environ.update(WORKER_ENVIRONMENT)
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)  # a log: nothing folded
    rows: list[Row] = []
    began, busy, used = time.perf_counter(), busy_cpu_seconds(), time.process_time()
    cpu_seconds = 0.0
    for world_size in options.ranks:
        more, seconds = measure(world_size, options, console)
        rows += more
        cpu_seconds += seconds
    load = "Load by other programs: not known."
    if busy is not None and (busy_after := busy_cpu_seconds()) is not None:
        others = busy_after - busy - cpu_seconds - (time.process_time() - used)
        share = max(0.0, others) / ((time.perf_counter() - began) * (os.cpu_count() or 1))
        load = f"Other programs used {share:.1%} of the machine's CPU time."
    facts = {
        "title": TITLE + ", smoke run" * options.quick,
        "command": shlex.join(["python", "benchmarks/collectives.py", *arguments]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": report.commit(ROOT),
        "versions": {"torch": report.versions()["torch"]},
        "hardware": report.hardware(),
        "settings": {"rounds": options.rounds, "ranks": options.ranks, "sizes": options.sizes, "seed": options.seed},
        "load": load,
    }
    table = Table(*HEADERS, title=TITLE, title_justify="left", header_style="bold")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table, load)
    stem = options.out or ROOT / "benchmarks" / "results" / ("collectives" + "-quick" * options.quick)
    stem.parent.mkdir(parents=True, exist_ok=True)
    everything = {**facts, "rows": [dataclasses.asdict(row) for row in rows]}
    stem.with_name(stem.name + ".json").write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n")
    stem.with_name(stem.name + ".md").write_text(markdown(rows, facts))
    console.print(f"written: {os.path.relpath(stem)}.json and .md", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
