"""A measured step: its timeline, the bubble beside the formula, and a better split of the layers if there is one."""

from dataclasses import dataclass
from pathlib import Path

from lightning_dist.core.errors import ConfigurationError
from lightning_dist.pipeline.schedule import Timeline, chrome_trace, draw_html, draw_svg, draw_text

WORTH_SAYING = 0.03
"""A split that would make the slowest stage less than this share faster is not worth the trouble."""


@dataclass(frozen=True)
class PipelineReport:
    """What the last step of a run looked like.

    Attributes:
        timeline: the measured spans, in seconds.
        schedule: its name.
        expected_bubble_share: by formula, for equal stages and free transfers; None where there is no formula.
        split: the layers of each stage.
        better_split: one that the measured times say is faster, else None.
        gain: how much less time the slowest stage would take with it, as a share.
    """

    timeline: Timeline
    schedule: str
    expected_bubble_share: float | None
    split: tuple[int, ...]
    better_split: tuple[int, ...] | None
    gain: float

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they did not compute."""
        return self.timeline.bubble_share

    @property
    def slowest_stage(self) -> int:
        """The stage that took most time."""
        times = self.timeline.stage_busy
        return max(times, key=lambda stage: times[stage])

    def __str__(self) -> str:
        """The picture and what follows from it."""
        times = self.timeline.stage_busy
        formula = "" if self.expected_bubble_share is None else f" (by formula {self.expected_bubble_share:.1%})"
        lines = [
            draw_text(self.timeline, unit="s"),
            f"{self.schedule}: bubble {self.bubble_share:.1%}{formula} of all ranks' time; the slowest stage is "
            f"{self.slowest_stage} with {times[self.slowest_stage]:.4g} s of the step's {self.timeline.makespan:.4g} s",
        ]
        if self.better_split is not None:
            lines.append(
                f"split={list(self.better_split)} would make the slowest stage about {self.gain:.0%} faster than "
                f"split={list(self.split)}"
            )
        return "\n".join(lines)

    def save(self, path: str | Path) -> Path:
        """Draw the timeline into a file: .html, .svg, .json (Chrome trace, for Perfetto) or .txt.

        Raises:
            ConfigurationError: another ending.
        """
        path = Path(path)
        title = f"{self.schedule}, measured"
        forms = {
            ".html": lambda: draw_html(self.timeline, title=title, unit="s", note=str(self).splitlines()[-1]),
            ".svg": lambda: draw_svg(self.timeline, unit="s"),
            ".json": lambda: chrome_trace(self.timeline),
            ".txt": lambda: f"{self}\n",
        }
        if path.suffix not in forms:
            raise ConfigurationError(f"{path} ends in {path.suffix!r}; use {', '.join(forms)}")
        path.write_text(forms[path.suffix](), encoding="utf-8")
        return path
