"""Show a schedule: ``python -m lightning_dist.pipeline.schedule 1f1b --ranks 4 --micro-batches 8 --html page.html``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_dist.core.errors import ConfigurationError
from lightning_dist.pipeline.schedule import (
    SCHEDULES,
    Shape,
    Times,
    build_schedule,
    chrome_trace,
    cost_of_stages,
    draw_html,
    draw_svg,
    draw_text,
    format_schedule,
    load_schedule,
    lower,
    schedule_row,
    simulate,
    validate,
)
from lightning_dist.pipeline.schedule.actions import COMPUTE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _show(options)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _show(options: argparse.Namespace) -> int:
    times = Times(*options.times)
    note = ""
    if options.schedule in SCHEDULES:
        schedule = build_schedule(options.schedule, options.ranks, options.micro_batches, options.virtual_stages)
    else:
        schedule = load_schedule(options.schedule)
    virtual_stages = len({action.stage for action in schedule[0]}) or 1
    if all(action.kind in COMPUTE for actions in schedule for action in actions):
        validate(schedule)
        schedule = lower(schedule)
    proof = validate(schedule)
    if options.schedule in SCHEDULES:
        shape = Shape(options.ranks, options.micro_batches, virtual_stages)
        note = f"By formula the bubble is {schedule_row(options.schedule).bubble_share(shape, times):.1%}."
    if options.actions:
        print(format_schedule(schedule), end="")
        return 0
    timeline = simulate(schedule, cost_of_stages(times, virtual_stages=virtual_stages), transfer=options.transfer)
    print(draw_text(timeline, width=options.width, ascii_only=options.ascii), end="")
    if note:
        print(note)
    title = f"{options.schedule}: {proof.num_ranks} ranks, {proof.num_micro_batches} micro-batches"
    for path, content in (
        (options.svg, draw_svg(timeline)),
        (options.html, draw_html(timeline, title=title, note=note)),
        (options.trace, chrome_trace(timeline, microseconds=1000.0)),
    ):
        if path is not None:
            path.write_text(content, encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_dist.pipeline.schedule", description="Prove, simulate and draw a pipeline schedule."
    )
    parser.add_argument(
        "schedule", help=f"one of {', '.join(SCHEDULES)}, or a file with a line of actions for each rank"
    )
    parser.add_argument("--ranks", type=int, default=4, metavar="P")
    parser.add_argument("--micro-batches", type=int, default=8, metavar="M")
    parser.add_argument("--virtual-stages", type=int, default=None, metavar="V", help="stages on each rank")
    parser.add_argument(
        "--times",
        type=float,
        nargs=3,
        default=(1.0, 1.0, 1.0),
        metavar=("F", "I", "W"),
        help="of a micro-batch on all stages of a rank: forward, input gradient, weight gradient (a backward is I + W)",
    )
    parser.add_argument("--transfer", type=float, default=0.0, metavar="T", help="time of a message between two ranks")
    parser.add_argument("--actions", action="store_true", help="print the actions, with communication, and no drawing")
    parser.add_argument("--width", type=int, default=100, help="columns of the drawing")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters alone")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto, 1 unit of time = 1 ms")
    return parser


if __name__ == "__main__":
    sys.exit(main())
