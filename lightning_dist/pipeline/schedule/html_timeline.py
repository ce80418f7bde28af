"""A timeline as one HTML page: no network, no other file, readable on a phone and in the dark."""

from html import escape

from lightning_dist.pipeline.schedule.actions import Kind
from lightning_dist.pipeline.schedule.labels import MEANINGS, busiest, number
from lightning_dist.pipeline.schedule.spans import Timeline
from lightning_dist.pipeline.schedule.svg_timeline import GAP, ROW, TONES, draw_svg

_STYLE = f"""
:root {{ color-scheme: light dark; --page: #fff; --text: #222; --soft: #666; --line: #ccc; }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #1b1b1b; --text: #ddd; --soft: #999; --line: #444; }} }}
body {{ background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; margin: 1rem auto;
  max-width: 75rem; padding: 0 1rem; }}
h1 {{ font-size: 1.3rem; }}
.chart {{ display: flex; overflow-x: auto; padding-bottom: .5rem; }}
.ranks {{ background: var(--page); left: 0; padding-right: .6rem; position: sticky; white-space: nowrap; }}
.ranks div {{ font-size: .85rem; height: {ROW}px; line-height: {ROW}px; margin-bottom: {GAP}px; }}
.chart svg {{ flex: none; }}
#told {{ color: var(--soft); min-height: 3em; }}
.legend span {{ margin-right: 1.2em; white-space: nowrap; }}
.legend i {{ border-radius: 2px; display: inline-block; height: .8em; margin-right: .1em; width: .8em; }}
.legend i + b {{ margin-left: .3em; font-weight: normal; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ border-bottom: 1px solid var(--line); padding: .2rem .8rem; text-align: right; }}
th:first-child, td:first-child {{ padding-left: 0; text-align: left; }}
"""

_SCRIPT = """
const told = document.getElementById("told");
let chosen = null;
function tell(event) {
  const bar = event.target.closest("rect");
  if (!bar) return;
  if (chosen) chosen.classList.remove("chosen");
  chosen = bar;
  bar.classList.add("chosen");
  told.textContent = bar.querySelector("title").textContent;
}
for (const kind of ["pointerover", "click"]) document.querySelector(".chart").addEventListener(kind, tell);
"""


def draw_html(timeline: Timeline, *, title: str = "Pipeline timeline", unit: str = "", note: str = "") -> str:
    """Draw a timeline as a whole page; pointing at an action or touching it tells what it is and how long it took.

    Args:
        title: the heading.
        unit: written behind times, such as ``" ms"``.
        note: a sentence below the heading, such as the bubble by formula.
    """
    kinds = {span.action.kind for spans in timeline.spans for span in spans}
    num_turns = max((len({span.action.stage for span in spans}) for spans in timeline.spans), default=1)
    legend = []
    for kind, tones in TONES.items():
        if kind in kinds:
            boxes = "".join(f'<i style="background:{tone}"></i>' for tone in tones[:num_turns])
            legend.append(f"<span>{boxes}<b>{MEANINGS[kind]}</b></span>")
    if kinds & {Kind.SEND_FORWARD, Kind.SEND_BACKWARD}:
        legend.append('<span><i style="background:#999"></i><b>a send that waits for its receiver</b></span>')
    if num_turns > 1:
        legend.append("<span>paler: the rank's later stages</span>")
    peaks = timeline.peak_live()
    rows = "".join(
        f"<tr><td>{rank}</td><td>{number(timeline.busy[rank])}{escape(unit)}</td>"
        f"<td>{timeline.bubble_share_of(rank):.1%}</td><td>{number(peaks[rank])}</td></tr>\n"
        for rank in range(timeline.num_ranks)
    )
    ranks = "".join(f"<div>rank {rank}</div>" for rank in range(timeline.num_ranks))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>A step takes {number(timeline.makespan)}{escape(unit)}. The bubble is {timeline.bubble_share:.1%} of the ranks' time;
{busiest(timeline)}. {escape(note)}</p>
<p class="legend">{"".join(legend)}</p>
<div class="chart">
<div class="ranks">{ranks}</div>
{draw_svg(timeline, unit=escape(unit), with_ranks=False)}</div>
<p id="told">The numbers are micro-batches. Point at an action, or touch it, to see what it is and how long it took.</p>
<div class="table"><table>
<tr><th>rank</th><th>busy</th><th>bubble</th><th>live activations</th></tr>
{rows}</table></div>
<script>{_SCRIPT}</script>
</body>
</html>
"""
