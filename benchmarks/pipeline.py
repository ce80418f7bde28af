"""Our pipeline schedules beside torch.distributed.pipelining's, on the same transformer, in interleaved rounds.

    python benchmarks/pipeline.py               # 2 and 4 ranks, all schedules
    python benchmarks/pipeline.py --quick       # a smoke run

Both systems of a schedule live in the same processes and take turns of a few steps, in shuffled order; a ratio pairs
the turns of one round, and the tables show medians over rounds. Bubbles say something where every rank has a core of
its own: ranks that share one lengthen each other's computation, and what is idle then is not what the formula counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: let the package be found from the root of the project instead
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.measure import Spread, busy_cpu_seconds
from benchmarks.pairs import WORKER_ENVIRONMENT
from benchmarks.pipeline_worker import OURS, PEERS, TORCH, PipelineJob, RankReady, RankTurn, serve
from lightning_dist.pipeline.schedule import Shape, Timeline, schedule_row

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = (OURS, TORCH)


class SystemsFailed(Exception):
    """A schedule is out of the run; the message is the reason."""


@dataclass
class Turn:
    """All ranks' turn of one system."""

    system: str
    seconds: float
    cpu_seconds: float
    bubble_share: float
    foreign_load: float | None


@dataclass
class Result:
    """One schedule on so many ranks."""

    job: PipelineJob
    skipped: str | None = None
    ready: list[RankReady] = field(default_factory=list)
    rounds: list[dict[str, Turn]] = field(default_factory=list)

    def ratio(self, what: str) -> Spread:
        return Spread.of([getattr(r[OURS], what) / getattr(r[TORCH], what) for r in self.rounds])

    def median(self, system: str, what: str) -> float:
        return Spread.of([getattr(r[system], what) for r in self.rounds]).median

    def peak(self, system: str) -> int:
        return max(ready.peak_bytes[system] for ready in self.ready)

    @property
    def expected_bubble_share(self) -> float:
        job = self.job
        return schedule_row(job.schedule).bubble_share(Shape(job.ranks, job.micro_batches, job.virtual_stages))


class Group:
    """The processes of one schedule."""

    def __init__(self, job: PipelineJob, directory: str, warmup: int, timeout: float) -> None:
        self._timeout = timeout
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        store = str(Path(directory) / f"{job.schedule}-{job.ranks}.store")
        for rank in range(job.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, job, rank, store, warmup), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def answers(self) -> list[Any]:
        """One answer of each rank.

        Raises:
            SystemsFailed: a rank failed, died or took too long.
        """
        found = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(self._timeout):
                raise SystemsFailed(f"rank {rank} gave no answer within {self._timeout:.0f} s")
            try:
                answer = connection.recv()
            except (EOFError, OSError):
                raise SystemsFailed(f"rank {rank} ended") from None
            if isinstance(answer, str):
                raise SystemsFailed(answer)
            found.append(answer)
        return found

    def turn(self, system: str, steps: int) -> Turn:
        busy = busy_cpu_seconds()
        for connection in self._connections:
            connection.send((system, steps))
        turns: list[RankTurn] = self.answers()
        foreign, cpu = None, sum(turn.cpu_seconds for turn in turns)
        seconds = max(turn.seconds for turn in turns)
        if busy is not None and (after := busy_cpu_seconds()) is not None:
            foreign = max(0.0, after - busy - cpu * steps) / (seconds * steps * (os.cpu_count() or 1))
        return Turn(system, seconds, cpu, Timeline([turn.spans for turn in turns]).bubble_share, foreign)

    def stop(self, *, politely: bool) -> None:
        for connection in self._connections if politely else ():
            connection.send(None)
        for process in self._processes:
            process.join(10 if politely else 0.1)
            if process.is_alive():
                process.kill()
                process.join()


def measure(job: PipelineJob, options: argparse.Namespace, directory: str, order: random.Random) -> Result:
    """Start both systems, let them take turns, end them."""
    result = Result(job)
    group = Group(job, directory, options.warmup, options.timeout)
    try:
        result.ready = group.answers()
        for _ in range(options.rounds):
            turns = {name: group.turn(name, options.steps_per_turn) for name in order.sample(SYSTEMS, 2)}
            result.rounds.append(turns)
    except SystemsFailed as failure:
        result.skipped = str(failure)
    group.stop(politely=result.skipped is None)
    return result


COLUMNS = {
    "ranks": lambda r: str(r.job.ranks),
    "torch's": lambda r: PEERS[r.job.schedule],
    "step time / torch": lambda r: f"{r.ratio('seconds').median:.3f}",
    "quartiles": lambda r: f"{r.ratio('seconds').q1:.3f} – {r.ratio('seconds').q3:.3f}",
    "CPU time / torch": lambda r: f"{r.ratio('cpu_seconds').median:.3f}",
    "ms / step": lambda r: f"{1e3 * r.median(OURS, 'seconds'):.0f}",
    "bubble": lambda r: f"{r.median(OURS, 'bubble_share'):.0%}",
    "torch's bubble": lambda r: f"{r.median(TORCH, 'bubble_share'):.0%}",
    "by formula": lambda r: f"{r.expected_bubble_share:.0%}",
    "peak MB": lambda r: f"{r.peak(OURS) / 1e6:.1f}",
    "torch's peak MB": lambda r: f"{r.peak(TORCH) / 1e6:.1f}",
    "gradients differ": lambda r: f"{max(ready.gradient_difference for ready in r.ready):.0e}",
}


def load_sentence(results: Sequence[Result]) -> str:
    turns = [turn for result in results for pair in result.rounds for turn in pair.values()]
    foreign = [turn.foreign_load for turn in turns if turn.foreign_load is not None]
    if not foreign:
        return "Load by other programs: not known."
    spread = Spread.of(foreign)
    return (
        f"Other programs used {spread.median:.1%} of the machine's CPU time during turns "
        f"(upper quartile {spread.q3:.1%}, worst turn {max(foreign):.1%})."
    )


def markdown(results: Sequence[Result], facts: dict[str, Any]) -> str:
    job = results[0].job
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        "# Pipeline schedules beside torch.distributed.pipelining",
        "",
        f"`{facts['command']}`",
        "",
        f"{facts['date']}, commit {facts['commit']}; {facts['hardware']['summary']}; {versions}.",
        "",
        f"A transformer of {job.layers} layers, hidden {job.hidden}, vocabulary {job.vocabulary}, fp32; "
        f"{job.micro_batches} micro-batches of {job.samples} x {job.sequence} tokens; forward and backward, no "
        f"optimizer; one thread each; {facts['settings']['rounds']} rounds of "
        f"{facts['settings']['steps_per_turn']} steps. "
        "Peak: live tensors besides parameters, gradients and the batch, on the worst rank. " + facts["load"],
        "",
        "| schedule | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for result in results:
        if result.skipped is None:
            cells = [result.job.schedule, *(cell(result) for cell in COLUMNS.values())]
            lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"- skipped: {r.job.schedule}, {r.job.ranks} ranks: {r.skipped}" for r in results if r.skipped]
    return "\n".join(lines).rstrip() + "\n"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/pipeline.py", description="Pipeline schedules")
    option = parser.add_argument
    option("--quick", action="store_true", help="smoke run: 2 ranks, a small model, three rounds")
    option("--ranks", default=None, help="numbers of ranks, separated by commas (2,4; quick: 2)")
    option("--schedules", default=",".join(PEERS), help="names separated by commas (all)")
    option("--rounds", type=int, default=None, help="rounds of each schedule (15; quick: 3)")
    option("--steps-per-turn", type=int, default=2, help="steps of a system in a round (2)")
    option("--warmup", type=int, default=3, help="steps before the first round (3)")
    option("--micro-batches", type=int, default=8, help="of a step (8)")
    option("--samples", type=int, default=1, help="of a micro-batch (1)")
    option("--sequence", type=int, default=128, help="tokens of a sample (128)")
    option("--hidden", type=int, default=None, help="width of the transformer (256; quick: 128)")
    option("--layers", type=int, default=8, help="divisible by twice the ranks (8)")
    option("--vocabulary", type=int, default=1024, help="small, so that the head is no stage of its own (1024)")
    option("--seed", type=int, default=0, help="of weights, data and the order of turns (0)")
    option("--timeout", type=float, default=300.0, help="seconds that a start or a turn may take (300)")
    option("--out", type=Path, default=None, help="path without suffix for the .json and .md")
    options = parser.parse_args(arguments)
    options.worlds = [int(part) for part in (options.ranks or ("2" if options.quick else "2,4")).split(",")]
    options.names = [part.strip() for part in options.schedules.split(",") if part.strip()]
    options.rounds = options.rounds or (3 if options.quick else 15)
    options.hidden = options.hidden or (128 if options.quick else 256)
    if unknown := [name for name in options.names if name not in PEERS]:
        parser.error(f"unknown schedules {', '.join(unknown)}; known are {', '.join(PEERS)}")
    if any(ranks < 2 or options.layers % (2 * ranks) for ranks in options.worlds):
        parser.error("--ranks must be at least 2, and twice as many must divide --layers")
    if min(options.rounds, options.steps_per_turn, options.warmup) < 1:
        parser.error("--rounds, --steps-per-turn and --warmup must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    os.environ.update(WORKER_ENVIRONMENT)
    console = Console()
    console = console if console.is_terminal else Console(width=190)  # a log: nothing folded
    results, order = [], random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        for ranks in options.worlds:
            for schedule in options.names:
                job = PipelineJob(
                    schedule=schedule,
                    ranks=ranks,
                    micro_batches=options.micro_batches,
                    samples=options.samples,
                    sequence=options.sequence,
                    hidden=options.hidden,
                    layers=options.layers,
                    vocabulary=options.vocabulary,
                    seed=options.seed,
                )
                console.print(f"{schedule} on {ranks} ranks", markup=False, highlight=False)
                results.append(measure(job, options, directory, order))
                if results[-1].skipped is not None:
                    console.print(f"out: {results[-1].skipped}", style="yellow", markup=False)
    facts: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/pipeline.py", *arguments]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": report.commit(ROOT),
        "versions": report.versions(),
        "hardware": report.hardware(),
        "settings": {name: getattr(options, name) for name in ("rounds", "steps_per_turn", "warmup")},
        "load": load_sentence(results),
    }
    table = Table(title="Pipeline schedules", title_justify="left", header_style="bold")
    for header in ("schedule", *COLUMNS):
        table.add_column(header, justify="left" if header == "schedule" else "right")
    for result in results:
        if result.skipped is None:
            table.add_row(result.job.schedule, *(cell(result) for cell in COLUMNS.values()))
    console.print(table)
    console.print(facts["load"])
    stem = options.out or ROOT / "benchmarks" / "results" / ("pipeline" + ("-quick" if options.quick else ""))
    stem.parent.mkdir(parents=True, exist_ok=True)
    everything = {**facts, "raw": [dataclasses.asdict(result) for result in results]}
    stem.with_name(stem.name + ".json").write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n")
    stem.with_name(stem.name + ".md").write_text(markdown(results, facts))
    console.print(f"written: {os.path.relpath(stem)}.json and .md", soft_wrap=True)
    return 0 if any(result.skipped is None for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
