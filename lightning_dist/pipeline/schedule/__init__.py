"""Schedules as data: made, lowered, proven, simulated and drawn, all without torch and without a second process.

::

    schedule = build_schedule("1f1b", num_ranks=4, num_micro_batches=8)     compute actions of each rank
    program = lower(schedule)                                               sends, receives and hooks added
    proof = validate(program)                                               complete, in order, cannot hang
    timeline = simulate(program, cost_of_stages(Times()))                   when each rank does what
    print(draw_text(timeline))

From a shell: ``python -m lightning_dist.pipeline.schedule 1f1b --ranks 4 --micro-batches 8``.
"""

from lightning_dist.pipeline.schedule.actions import (
    Action,
    InvalidScheduleError,
    Kind,
    Schedule,
    format_schedule,
    load_schedule,
    parse_action,
    parse_schedule,
)
from lightning_dist.pipeline.schedule.chrome_trace import chrome_trace
from lightning_dist.pipeline.schedule.closed_forms import Shape, Times
from lightning_dist.pipeline.schedule.html_timeline import draw_html
from lightning_dist.pipeline.schedule.lower import lower
from lightning_dist.pipeline.schedule.placement import Placement
from lightning_dist.pipeline.schedule.schedules import SCHEDULES, ScheduleRow, build_schedule, schedule_row
from lightning_dist.pipeline.schedule.simulate import cost_of_stages, simulate
from lightning_dist.pipeline.schedule.spans import Span, Timeline
from lightning_dist.pipeline.schedule.svg_timeline import draw_svg
from lightning_dist.pipeline.schedule.text_timeline import draw_text
from lightning_dist.pipeline.schedule.validate import Proof, validate

__all__ = [
    "Action",
    "Kind",
    "Schedule",
    "InvalidScheduleError",
    "parse_action",
    "parse_schedule",
    "format_schedule",
    "load_schedule",
    "SCHEDULES",
    "ScheduleRow",
    "Placement",
    "schedule_row",
    "build_schedule",
    "Shape",
    "Times",
    "lower",
    "validate",
    "Proof",
    "cost_of_stages",
    "simulate",
    "Span",
    "Timeline",
    "draw_text",
    "draw_svg",
    "draw_html",
    "chrome_trace",
]
