"""A timeline as an SVG picture: one rectangle for each span, with its action and time as a tooltip.

The colours are close to those of Okabe and Ito (2008, "Color Universal Design"), in paler tones for the stages of later
turns. Tests hold what matters: seen with any of the three colour vision deficiencies (Machado et al. 2009), no two
kinds of action come closer than 9 in CIELAB, and every label has a contrast of 4.5 or more to its rectangle. The
picture follows the reader's choice of a light or a dark page.
"""

from xml.sax.saxutils import escape

from lightning_dist.pipeline.schedule.actions import COMPUTE, Kind
from lightning_dist.pipeline.schedule.labels import long_label, number, turns_of
from lightning_dist.pipeline.schedule.spans import Span, Timeline

ROW, GAP, AXIS = 28, 6, 24  # heights in pixels: a rank, the space between two, the line of times
LABELS = 64  # width in pixels of the ranks' names
_LETTER = 7  # width in pixels of a character of a label

TONES = {
    Kind.FORWARD: ("#1f77b4", "#62a0ca", "#9ac2dd"),
    Kind.BACKWARD: ("#d55e00", "#e28e4c", "#ecb78c"),
    Kind.INPUT_GRAD: ("#ffd92f", "#ffe46d", "#ffeea1"),
    Kind.WEIGHT_GRAD: ("#009e73", "#4cbb9d", "#8cd3c0"),
}
"""Fill by kind and turn."""
LIGHT_ON = {"#1f77b4"}  # fills on which a white label is easier to read than a black one

STYLE = """
.timeline { --lane: #ececec; --ink: #222; --grid: #bbb; font: 12px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .timeline { --lane: #333; --ink: #ddd; --grid: #555; } }
.timeline text { fill: var(--ink); }
.timeline .lane { fill: var(--lane); }
.timeline .grid { stroke: var(--grid); }
.timeline rect { stroke: var(--lane); stroke-width: 1; }
.timeline rect:hover, .timeline rect.chosen { stroke: var(--ink); stroke-width: 2.5; }
.timeline .on { fill: #000; text-anchor: middle; pointer-events: none; }
.timeline .light { fill: #fff; }
.timeline .wait { fill: #999; }
""" + "".join(
    f".timeline .{kind.value}{turn} {{ fill: {tone}; }}\n"
    for kind, tones in TONES.items()
    for turn, tone in enumerate(tones)
)


def draw_svg(timeline: Timeline, *, width: int | None = None, unit: str = "", with_ranks: bool = True) -> str:
    """Draw a timeline as a whole SVG document.

    Args:
        width: in pixels; None for what makes the labels of most actions legible, from 640 to 6000.
        unit: written behind times, such as ``" ms"``.
        with_ranks: whether the names of the ranks stand at the left.
    """
    left = LABELS if with_ranks else 0
    width = width or _legible_width(timeline) + left
    room = width - left - 8
    scale = room / timeline.makespan if timeline.makespan else 0.0
    height = timeline.num_ranks * (ROW + GAP) + AXIS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        f"<title>Pipeline timeline of {timeline.num_ranks} ranks</title>",
    ]
    parts += _axis(timeline, left, room, unit)
    for rank, spans in enumerate(timeline.spans):
        top = rank * (ROW + GAP)
        if with_ranks:
            parts.append(f'<text x="0" y="{top + ROW / 2 + 4:g}">rank {rank}</text>')
        parts.append(f'<path class="lane" d="M{left} {top}h{room}v{ROW}h{-room}z"/>')
        turns = turns_of(spans)
        for span in spans:
            turn = turns.get(span.action.stage, 0)
            tip = long_label(span, rank, timeline.start, unit)
            parts.append(
                _bar(span, turn, tip, left + (span.start - timeline.start) * scale, top, span.duration * scale)
            )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _bar(span: Span, turn: int, tip: str, x: float, y: int, width: float) -> str:
    kind = span.action.kind
    tone = min(turn, 2)
    style = f"{kind.value}{tone}" if kind in COMPUTE else "wait"
    place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}"'
    bar = f'<rect class="{style}" {place}><title>{escape(tip)}</title></rect>'
    label = str(span.action.micro_batch)
    if kind in COMPUTE and width >= _LETTER * len(label) + 2:
        light = " light" if TONES[kind][tone] in LIGHT_ON else ""
        bar += f'<text class="on{light}" x="{x + width / 2:.2f}" y="{y + ROW / 2 + 4:g}">{label}</text>'
    return bar


def _axis(timeline: Timeline, left: int, room: int, unit: str) -> list[str]:
    """A line and a time at round numbers, five to ten of them."""
    if timeline.makespan == 0:
        return []
    bottom = timeline.num_ranks * (ROW + GAP)
    step = _round_step(timeline.makespan)
    parts = []
    for index in range(int(timeline.makespan / step + 1e-9) + 1):
        x = left + index * step / timeline.makespan * room
        anchor = "start" if index == 0 else "end" if x > left + room - 30 else "middle"
        parts.append(f'<path class="grid" d="M{x:.2f} 0v{bottom}"/>')
        parts.append(f'<text x="{x:.2f}" y="{bottom + 14}" text-anchor="{anchor}">{number(index * step)}{unit}</text>')
    return parts


def _round_step(makespan: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that divides the time into ten parts at most."""
    power = 10.0 ** int(f"{makespan / 10:e}".partition("e")[2])
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * 10 >= makespan * (1 - 1e-9))


def _legible_width(timeline: Timeline) -> int:
    """A twentieth of the actions may be too short for their label: measured times have outliers."""
    spans = [span for spans in timeline.spans for span in spans if span.action.kind in COMPUTE and span.duration > 0]
    if not spans:
        return 640
    digits = max(len(str(span.action.micro_batch)) for span in spans)
    durations = sorted(span.duration for span in spans)
    per_time = (_LETTER * digits + 9) / durations[len(durations) // 20]
    return round(min(max(per_time * timeline.makespan, 640), 6000))
