"""A timeline in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("X" is a complete event,
"M" names a track); times are in microseconds.
"""

import json
from typing import Any

from lightning_dist.pipeline.schedule.labels import MEANINGS
from lightning_dist.pipeline.schedule.spans import Timeline


def chrome_trace(timeline: Timeline, *, microseconds: float = 1e6) -> str:
    """The timeline as JSON, one track for each rank, starting at 0.

    Args:
        microseconds: how many make one unit of the timeline's time; the default is for spans in seconds.
    """
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(timeline.spans):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for span in spans:
            action = span.action
            events.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": MEANINGS[action.kind],
                    "pid": 0,
                    "tid": rank,
                    "ts": (span.start - timeline.start) * microseconds,
                    "dur": span.duration * microseconds,
                    "args": {"stage": action.stage, "micro_batch": action.micro_batch},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
