"""A timeline for a terminal.

::

    rank 0  F0F1····B0──B1──
    rank 1  ··F0B0──F1B1────      a letter starts an action, the number is the micro-batch, dots are idle time
"""

from lightning_dist.pipeline.schedule.actions import COMPUTE
from lightning_dist.pipeline.schedule.labels import short_label, summary_line, turns_of
from lightning_dist.pipeline.schedule.spans import Timeline

_SMALLEST_WIDTH = 24


def draw_text(timeline: Timeline, *, width: int = 100, ascii_only: bool = False, unit: str = "") -> str:
    """Draw the ranks one below the other, and a line of numbers.

    The second stage of a rank has small letters (f3), a third one primes too (f3'). A SEND that waited is drawn as
    ``>``. Where labels do not fit, only their first letter is drawn; actions shorter than a column are left out, and
    their number is told.

    Args:
        width: the most columns that a line of the drawing may have, at least 24.
        ascii_only: use no other characters than those of ASCII.
        unit: written behind times, such as ``" ms"``.
    """
    margin = len(f"rank {timeline.num_ranks - 1}") + 2
    room = max(width, _SMALLEST_WIDTH) - margin
    scale = _columns_per_time(timeline, room)
    idle, fill = (".", "-") if ascii_only else ("·", "─")
    lines = []
    left_out = 0
    columns = round(timeline.makespan * scale)
    for rank, spans in enumerate(timeline.spans):
        turns = turns_of(spans)
        row = [idle] * columns
        for span in spans:
            first = round((span.start - timeline.start) * scale)
            size = round((span.end - timeline.start) * scale) - first
            if size < 1:
                left_out += 1
            elif span.action.kind in COMPUTE:
                label = short_label(span.action, turns[span.action.stage])
                row[first : first + size] = (label if len(label) <= size else label[0]).ljust(size, fill)
            else:
                row[first : first + size] = ">" * size
        lines.append(f"rank {rank}".ljust(margin) + "".join(row))
    if left_out:
        lines.append(f"({left_out} actions are shorter than a column and not drawn)")
    lines.append(summary_line(timeline, unit))
    return "\n".join(lines) + "\n"


def _columns_per_time(timeline: Timeline, room: int) -> float:
    """As many as all labels need, if there is room; else a whole number for the shortest action, if there is room."""
    if timeline.makespan == 0:
        return 0.0
    labels = [1]
    durations = [timeline.makespan]
    for spans in timeline.spans:
        turns = turns_of(spans)
        for span in spans:
            if span.action.kind in COMPUTE and span.duration > 0:
                labels.append(len(short_label(span.action, turns[span.action.stage])))
                durations.append(span.duration)
    shortest = min(durations)
    most = room / timeline.makespan
    wanted = (max(labels) + 1) / shortest
    if wanted <= most:
        return wanted
    whole = int(most * shortest + 1e-9)
    return whole / shortest if whole else most
