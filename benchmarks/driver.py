"""Several systems train the same model in one interleaved run; what `zero.py` and `tensor.py` have in common.

Step times of two programs run one after the other on a shared machine differ by more than the programs do.
So all systems of a group are alive at once and take turns of a few steps in shuffled order. A ratio pairs turns
of one round: what slows the machine for minutes slows both, and the median over rounds drops shorter noise.

    round 1:  [ddp][zero3][fsdp2][zero1]   round 2:  [zero1][ddp][fsdp2][zero3]   ...
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import report
from benchmarks.measure import Spread
from benchmarks.pairs import KEEP_MEMORY_ENVIRONMENT, WORKER_ENVIRONMENT, Pair, SystemFailed
from benchmarks.report import Result
from benchmarks.systems import BASE, SYSTEMS
from benchmarks.workload import MODEL_SIZES, Job

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Comparison:
    """What an entry point compares: its name (also of the results), a title, and which systems take part."""

    name: str
    title: str
    systems: tuple[str, ...]
    quick: tuple[str, ...]


def parse_arguments(comparison: Comparison, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"benchmarks/{comparison.name}.py",
        description=comparison.title,
        epilog="systems:\n" + "\n".join(f"  {name:20} {SYSTEMS[name].label}" for name in comparison.systems),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--quick", action="store_true", help="smoke run: 10M parameters, few systems, three rounds")
    option("--model", choices=MODEL_SIZES, default=None, help="size of the Llama (60m; quick: 10m)")
    option("--precision", choices=("fp32", "bf16-mixed"), default="fp32")
    option("--systems", default=None, help="names separated by commas (all); ddp always takes part")
    option("--without", default="", help="names separated by commas to leave out")
    option("--rounds", type=int, default=None, help="rounds of each group (10; quick: 3)")
    option("--steps-per-turn", type=int, default=2, help="steps of a system in a round (2)")
    option("--warmup", type=int, default=4, help="steps before the first round, at least 3 (4)")
    option("--ranks", type=int, default=2, help="processes of each system, one thread each (2)")
    option("--sequence", type=int, default=256, help="tokens of a sample (256)")
    option("--global-batch", type=int, default=4, help="samples of a step over all ranks (4)")
    option("--learning-rate", type=float, default=3e-4, help="of AdamW (3e-4)")
    option("--seed", type=int, default=0, help="of weights, data and the order of turns (0)")
    option(
        "--deepspeed-buckets",
        choices=("fit", "default"),
        default="fit",
        help="buckets that fit the model, or DeepSpeed's own of 500M elements (fit)",
    )
    option(
        "--allocator",
        choices=("default", "keep"),
        default="default",
        help="keep: glibc keeps freed memory, in the processes of all systems alike (default)",
    )
    option("--group-size", type=int, default=None, help="systems alive at once (what memory allows)")
    option("--timeout", type=float, default=300.0, help="seconds that a start or a turn may take (300)")
    option("--out", type=Path, default=None, help="path without suffix for the .json and .md")
    options = parser.parse_args(arguments)
    options.model = options.model or ("10m" if options.quick else "60m")
    options.rounds = options.rounds or (3 if options.quick else 10)
    options.names = _chosen(comparison, options, parser)
    if options.warmup < 3 or options.steps_per_turn < 1 or options.rounds < 1:
        parser.error("--warmup must be at least 3, --rounds and --steps-per-turn at least 1")
    if options.ranks < 2 or options.global_batch % options.ranks:
        parser.error("--ranks must be at least 2 and divide --global-batch")
    return options


def _chosen(comparison: Comparison, options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    default = ",".join(comparison.quick if options.quick else comparison.systems)
    wanted = [name.strip() for name in (options.systems or default).split(",") if name.strip()]
    unwanted = [name.strip() for name in options.without.split(",") if name.strip()]
    unknown = [name for name in wanted + unwanted if name not in SYSTEMS]
    if unknown:
        parser.error(f"unknown systems {', '.join(unknown)}; known are {', '.join(SYSTEMS)}")
    return [name for name in SYSTEMS if name != BASE and name in wanted and name not in unwanted]


def available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not say how much memory is available; pass --group-size")


def plan_groups(names: Sequence[str], job: Job, size: int | None) -> list[list[str]]:
    """Split the systems into groups that fit into memory, as even as can be, equal stages together, all with DDP.

    What rests in all ranks of a group, and the peak of the system whose turn it is, may take 80 % of memory.
    """
    if not names:
        return [[BASE]]
    resident = {name: job.world_size * SYSTEMS[name].resident_bytes(job) for name in (BASE, *names)}
    if size is None:
        peak = job.world_size * job.parameter_bytes
        budget = 0.8 * available_memory() - peak - resident[BASE]
        size = max(1, int(budget // max(resident[name] for name in names)))
    else:
        size = max(1, size - 1)
    by_stage = sorted(names, key=lambda name: SYSTEMS[name].stage)
    count = -(-len(names) // size)
    bounds = [len(names) * index // count for index in range(count + 1)]
    return [[BASE, *by_stage[start:stop]] for start, stop in itertools.pairwise(bounds)]


class Run:
    """Groups one after the other, each in rounds."""

    def __init__(self, options: argparse.Namespace, job: Job, console: Console, progress: Progress) -> None:
        self._options = options
        self._job = job
        self._console = console
        self._progress = progress
        self._order = random.Random(options.seed)

    def group(self, index: int, names: Sequence[str], directory: Path) -> list[Result]:
        """Start all systems of a group, let them take turns, end them."""
        directory.mkdir()
        results = {name: Result(name, index) for name in names}
        pairs: dict[str, Pair] = {}
        try:
            for name in names:
                with self._stage(f"starting {name}"):
                    self._start(results[name], pairs, directory)
            for round_ in range(self._options.rounds):
                order = [name for name in names if name in pairs]
                self._order.shuffle(order)
                for name in order:
                    with self._stage(f"round {round_ + 1}: {name}"):
                        self._turn(results[name], pairs)
                self._progress.advance(self._bar, len(names) - len(order))
        finally:
            for pair in pairs.values():
                pair.stop()
        return list(results.values())

    def _start(self, result: Result, pairs: dict[str, Pair], directory: Path) -> None:
        pair = Pair(result.system, self._job, directory, self._options.warmup, self._options.timeout)
        try:
            result.ready = pair.start()
            result.losses = pair.losses
            pairs[result.system] = pair
        except SystemFailed as failure:
            self._drop(result, pair, failure)

    def _turn(self, result: Result, pairs: dict[str, Pair]) -> None:
        try:
            result.turns.append(pairs[result.system].turn(self._options.steps_per_turn))
        except SystemFailed as failure:
            self._drop(result, pairs.pop(result.system), failure)

    def _drop(self, result: Result, pair: Pair, failure: SystemFailed) -> None:
        result.skipped = str(failure)
        self._console.print(f"{result.system} is out: {failure}", style="yellow", markup=False)
        if not result.skipped.startswith("not available") and (tail := pair.log_tail()):
            self._console.print(tail, style="dim", markup=False, highlight=False)

    @contextmanager
    def _stage(self, text: str) -> Iterator[None]:
        self._progress.update(self._bar, description=text, refresh=True)
        if not self._console.is_terminal:  # no bar in a log, so lines
            self._console.print(text, markup=False, highlight=False)
        yield
        self._progress.advance(self._bar)
        self._progress.refresh()

    def all(self, groups: Sequence[Sequence[str]]) -> list[Result]:
        """Run every group."""
        total = sum(len(group) * (1 + self._options.rounds) for group in groups)
        self._bar = self._progress.add_task("starting", total=total)
        results = []
        with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
            for index, names in enumerate(groups):
                results += self.group(index, names, Path(directory) / str(index))
        return results


def load_sentence(results: Sequence[Result]) -> str:
    """How much CPU time went to programs that do not belong to the run, while turns were taken."""
    foreign = [turn.foreign_load for r in results for turn in r.turns if turn.foreign_load is not None]
    if not foreign:
        return "Load by other programs: not known."
    spread = Spread.of(foreign)
    worst = f"upper quartile {spread.q3:.1%}, worst turn {max(foreign):.1%}"
    return f"Other programs used {spread.median:.1%} of the machine's CPU time during turns ({worst})."


def main(comparison: Comparison, arguments: Sequence[str] | None = None) -> int:
    """Run a comparison from the command line; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(comparison, arguments)
    os.environ.update(WORKER_ENVIRONMENT | (KEEP_MEMORY_ENVIRONMENT if options.allocator == "keep" else {}))
    job = Job(
        size=MODEL_SIZES[options.model],
        precision=options.precision,
        world_size=options.ranks,
        global_batch=options.global_batch,
        sequence=options.sequence,
        seed=options.seed,
        learning_rate=options.learning_rate,
        deepspeed_buckets=options.deepspeed_buckets,
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)  # a log: nothing folded
    groups = plan_groups(options.names, job, options.group_size)
    console.print(
        f"{job.size.num_parameters / 1e6:.1f}M parameters, {job.precision}, {job.world_size} ranks; "
        f"{len(groups)} group{'s' * (len(groups) > 1)}: " + "; ".join(", ".join(group) for group in groups),
        soft_wrap=True,
    )
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # No refreshing thread: the run must not compete with what it measures.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        results = Run(options, job, console, progress).all(groups)
    rows = report.summarize_all(results)
    facts = {
        "title": f"{comparison.title}, {options.model}, {options.precision}{', smoke run' * options.quick}",
        "command": shlex.join(["python", f"benchmarks/{comparison.name}.py", *arguments]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": report.commit(ROOT),
        "versions": report.versions(),
        "hardware": report.hardware(),
        "settings": {
            "rounds": options.rounds,
            "steps_per_turn": options.steps_per_turn,
            "warmup": options.warmup,
            "allocator": options.allocator,
            "groups": groups,
        },
        "load": load_sentence(results),
    }
    report.print_tables(console, rows, job)
    console.print(facts["load"])
    stem = options.out or ROOT / "benchmarks" / "results" / _stem(comparison, options)
    report.write(stem, rows, results, job, facts)
    console.print(f"written: {os.path.relpath(stem)}.json and .md", soft_wrap=True)
    return 0 if any(row.skipped is None for row in rows) else 1


def _stem(comparison: Comparison, options: argparse.Namespace) -> str:
    parts = [comparison.name, options.model, options.precision]
    parts += ["keep"] if options.allocator == "keep" else []
    parts += ["default-buckets"] if options.deepspeed_buckets == "default" else []
    return "-".join([*parts, *(["quick"] if options.quick else [])])
