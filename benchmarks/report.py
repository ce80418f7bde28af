"""From what was measured to tables on the terminal, in markdown, and JSON with everything in it."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Spread
from benchmarks.pairs import TurnResult
from benchmarks.systems import BASE, SYSTEMS
from benchmarks.worker import Ready
from benchmarks.workload import Job

PACKAGES = ("torch", "transformers", "deepspeed", "lightning")
MEGABYTE = 1e6


@dataclass
class Result:
    """One system within one group; turn i was taken in round i."""

    system: str
    group: int
    skipped: str | None = None
    ready: list[Ready] = field(default_factory=list)
    turns: list[TurnResult] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """A row of the tables. Ratios pair a turn with the base's turn of the same round."""

    system: str
    label: str
    stage: str
    group: int
    skipped: str | None
    time_ratio: Spread | None = None
    cpu_ratio: Spread | None = None
    seconds_per_step: float | None = None
    faults_per_step: float | None = None
    bytes_sent_per_step: float | None = None
    ledger_bytes_per_step: float | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None
    shared_bytes: int | None = None
    peak_resident_bytes: int | None = None
    start_peak_resident_bytes: int | None = None
    foreign_load: float | None = None
    steps: int = 0
    last_loss: float | None = None
    largest_loss_difference: float | None = None


def summarize(result: Result, base: Result | None) -> Summary:
    """Reduce one system's turns to a row."""
    system = SYSTEMS[result.system]
    if result.skipped is not None or not result.turns:
        reason = result.skipped or "took no turn"
        return Summary(result.system, system.label, system.stage, result.group, reason)
    turns = result.turns
    paired = list(zip(turns, base.turns, strict=False)) if base is not None else []
    time_ratios = [turn.seconds_per_step / other.seconds_per_step for turn, other in paired]
    cpu_ratios = [turn.cpu_seconds_per_step / other.cpu_seconds_per_step for turn, other in paired]
    traffic = [turn.bytes_sent_per_step for turn in turns if turn.bytes_sent_per_step is not None]
    ledger = [turn.ledger_bytes_per_step for turn in turns if turn.ledger_bytes_per_step is not None]
    foreign = [turn.foreign_load for turn in turns if turn.foreign_load is not None]
    memory = [ready.memory for ready in result.ready if ready.memory is not None]
    difference = None
    if base is not None and system.averages_gradients:
        difference = max(abs(a - b) for a, b in zip(result.losses, base.losses, strict=False))
    return Summary(
        system=result.system,
        label=system.label,
        stage=system.stage,
        group=result.group,
        skipped=None,
        time_ratio=Spread.of(time_ratios) if paired else None,
        cpu_ratio=Spread.of(cpu_ratios) if paired else None,
        seconds_per_step=Spread.of([turn.seconds_per_step for turn in turns]).median,
        faults_per_step=Spread.of([turn.faults_per_step for turn in turns]).median,
        bytes_sent_per_step=Spread.of(traffic).median if traffic else None,
        ledger_bytes_per_step=Spread.of(ledger).median if ledger else None,
        held_bytes=max((m.held for m in memory), default=None),
        peak_bytes=max((m.peak for m in memory), default=None),
        shared_bytes=max((m.shared for m in memory), default=None),
        peak_resident_bytes=max(turn.peak_resident for turn in turns),
        start_peak_resident_bytes=max(ready.start_peak_resident for ready in result.ready),
        foreign_load=Spread.of(foreign).q3 if foreign else None,
        steps=len(result.losses),
        last_loss=result.losses[-1],
        largest_loss_difference=difference,
    )


def summarize_all(results: Sequence[Result]) -> list[Summary]:
    """One row per system, in the order of the registry; the base, which ran in every group, once."""
    bases = {result.group: result for result in results if result.system == BASE and result.turns}
    rows: dict[str, Summary] = {}
    for result in results:
        if result.system not in rows or rows[result.system].skipped:
            rows[result.system] = summarize(result, bases.get(result.group))
    return [rows[name] for name in SYSTEMS if name in rows]


Cell = Callable[[Summary, Job], str]


def _scaled(pick: Callable[[Summary], float | None], scale: float, form: str) -> Cell:
    def cell(row: Summary, job: Job) -> str:
        value = pick(row)
        return "-" if value is None else format(value / scale, form)

    return cell


def _in_psi(pick: Callable[[Summary], float | None]) -> Cell:
    def cell(row: Summary, job: Job) -> str:
        value = pick(row)
        return "-" if value is None else f"{value / job.parameter_bytes:.2f}"

    return cell


def _median(pick: Callable[[Summary], Spread | None]) -> Cell:
    def cell(row: Summary, job: Job) -> str:
        spread = pick(row)
        return "-" if spread is None else f"{spread.median:.3f}"

    return cell


def _quartiles(row: Summary, job: Job) -> str:
    return "-" if row.time_ratio is None else f"{row.time_ratio.q1:.3f} – {row.time_ratio.q3:.3f}"


SPEED: dict[str, Cell] = {
    "ZeRO": lambda row, job: row.stage,
    "step time / DDP": _median(lambda row: row.time_ratio),
    "quartiles": _quartiles,
    "CPU time / DDP": _median(lambda row: row.cpu_ratio),
    "s / step": _scaled(lambda row: row.seconds_per_step, 1, ".3f"),
    "faults / step": _scaled(lambda row: row.faults_per_step, 1, ",.0f"),
    "others": _scaled(lambda row: row.foreign_load, 1, ".0%"),
    "group": lambda row, job: str(row.group + 1),
}
COST: dict[str, Cell] = {
    "sent, Ψ": _in_psi(lambda row: row.bytes_sent_per_step),
    "ledger, Ψ": _in_psi(lambda row: row.ledger_bytes_per_step),
    "held MB": _scaled(lambda row: row.held_bytes, MEGABYTE, ".0f"),
    "peak MB": _scaled(lambda row: row.peak_bytes, MEGABYTE, ".0f"),
    "of them shared": _scaled(lambda row: row.shared_bytes, MEGABYTE, ".0f"),
    "RSS MB": _scaled(lambda row: row.peak_resident_bytes, MEGABYTE, ".0f"),
    "RSS at start": _scaled(lambda row: row.start_peak_resident_bytes, MEGABYTE, ".0f"),
    "loss": _scaled(lambda row: row.last_loss, 1, ".4f"),
    "max loss diff": _scaled(lambda row: row.largest_loss_difference, 1, ".1e"),
}


def print_tables(console: Console, rows: Sequence[Summary], job: Job) -> None:
    """The two tables, and who was skipped and why."""
    for title, columns in (("Speed", SPEED), ("Traffic and memory of a rank, and the loss", COST)):
        table = Table(title=title, title_justify="left", header_style="bold")
        table.add_column("system", no_wrap=True)
        for header in columns:
            table.add_column(header, justify="right", no_wrap=header == "quartiles")
        for row in rows:
            if row.skipped is None:
                style = "bold" if row.label.startswith("lightning_dist") else None
                table.add_row(row.label, *(cell(row, job) for cell in columns.values()), style=style)
        console.print(table)
    for row in rows:
        if row.skipped is not None:
            line = f"skipped: {row.label}: {row.skipped}"
            console.print(line, style="yellow", markup=False, soft_wrap=True)


def markdown(rows: Sequence[Summary], job: Job, facts: dict[str, Any]) -> str:
    """The same tables for a page."""
    settings = facts["settings"]
    lines = [
        f"# {facts['title']}",
        "",
        f"`{facts['command']}`",
        "",
        f"{facts['date']}, commit {facts['commit']}; {facts['hardware']['summary']}; "
        + ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        + ".",
        "",
        f"Llama of {job.size.num_parameters / 1e6:.1f}M parameters (hidden {job.size.hidden}, "
        f"{job.size.layers} layers, vocabulary {job.size.vocabulary}), {job.precision}, "
        f"sequence {job.sequence}, global batch {job.global_batch}, fused AdamW; "
        f"{job.world_size} ranks with one thread each; "
        f"{settings['rounds']} rounds of {settings['steps_per_turn']} steps. "
        f"Ψ = {job.parameter_bytes / 1e6:.0f} MB. "
        f"DeepSpeed buckets: {job.deepspeed_buckets}. Allocator: {settings['allocator']}. {facts['load']}",
        "",
    ]
    for columns in (SPEED, COST):
        lines.append("| system | " + " | ".join(columns) + " |")
        lines.append("|---|" + "---:|" * len(columns))
        for row in rows:
            if row.skipped is None:
                cells = [row.label, *(cell(row, job) for cell in columns.values())]
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    lines += [f"- skipped: {row.label}: {row.skipped}" for row in rows if row.skipped is not None]
    return "\n".join(lines).rstrip() + "\n"


def write(stem: Path, rows: Sequence[Summary], results: Sequence[Result], job: Job, facts: dict[str, Any]) -> None:
    """STEM.json with everything, STEM.md with the tables."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    everything = {
        **facts,
        "job": dataclasses.asdict(job),
        "num_parameters": job.size.num_parameters,
        "systems": [dataclasses.asdict(row) for row in rows],
        "raw": [dataclasses.asdict(result) for result in results],
    }
    text = json.dumps(everything, indent=1, ensure_ascii=False) + "\n"
    stem.with_name(stem.name + ".json").write_text(text)
    stem.with_name(stem.name + ".md").write_text(markdown(rows, job, facts))


def hardware() -> dict[str, Any]:
    """CPU model, usable cores, memory, kernel."""
    model = platform.processor() or platform.machine()
    memory = None
    cpuinfo, meminfo = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), model)
    if meminfo.exists():
        memory = int(meminfo.read_text().split("MemTotal:")[1].split()[0]) * 1024
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    size = f", {memory / 2**30:.0f} GiB" if memory else ""
    return {
        "summary": f"{model}, {cores} cores{size}, {platform.system()}",
        "cpu": model,
        "cores": cores,
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of the packages compared; those not installed are left out."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit(root: Path) -> str:
    """Commit of the working tree, marked if it has changes; "unknown" outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()
