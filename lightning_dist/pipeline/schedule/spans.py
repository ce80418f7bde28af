"""When each rank did what: the result of a simulation or of a measured step, and what follows from it.

::

    rank 0  |F0|F1|........|B0    |F2|..      busy: what is drawn; idle: the dots
    rank 1     |F0|B0    |F1|B1    |
            0                          makespan
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_dist.pipeline.schedule.actions import COMPUTE, Action, Kind


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it ran, in any one unit of time (seconds, where measured)."""

    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """End minus start."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank, in order of time, on one clock.

    Only compute actions count as busy. A SEND has a span where it waited for its receiver.
    """

    spans: Sequence[Sequence[Span]]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.spans)

    @cached_property
    def start(self) -> float:
        """The first start of any rank."""
        return min((spans[0].start for spans in self.spans if spans), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """From the first start of any rank to the last end of any rank."""
        return max((span.end for spans in self.spans for span in spans), default=self.start) - self.start

    @cached_property
    def busy(self) -> list[float]:
        """Time that each rank computes."""
        return [sum(span.duration for span in spans if span.action.kind in COMPUTE) for spans in self.spans]

    @cached_property
    def stage_busy(self) -> dict[int, float]:
        """Time that each stage is computed, by number."""
        total: dict[int, float] = {}
        for spans in self.spans:
            for span in spans:
                if span.action.kind in COMPUTE:
                    total[span.action.stage] = total.get(span.action.stage, 0.0) + span.duration
        return dict(sorted(total.items()))

    @property
    def idle(self) -> float:
        """Time of the step beyond what the busiest rank computes: the closed forms' `idle`."""
        return self.makespan - max(self.busy)

    @property
    def idle_overlapped(self) -> float:
        """The most that a rank idles between its own first start and last end."""
        windows = [
            max(span.end for span in spans) - spans[0].start - busy
            for spans, busy in zip(self.spans, self.busy, strict=True)
            if spans
        ]
        return max(windows, default=0.0)

    @property
    def bubble_ratio(self) -> float:
        """Idle time over the computing time of the busiest rank."""
        return self.idle / max(self.busy) if any(self.busy) else 0.0

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time that is not computation; what uneven stages leave idle counts too."""
        return self.bubble_share_of(None)

    def bubble_share_of(self, rank: int | None) -> float:
        """The share of a rank's time (None: of all ranks') that is not computation."""
        if self.makespan == 0:
            return 0.0
        if rank is None:
            return 1 - sum(self.busy) / (self.makespan * self.num_ranks)
        return 1 - self.busy[rank] / self.makespan

    @property
    def critical_rank(self) -> int:
        """The rank that computes longest: a better split would take layers from it. The first one of several."""
        return self.busy.index(max(self.busy))

    def peak_live(self, sizes: Sequence[float] | None = None) -> list[float]:
        """The most that each rank holds for backwards to come: from a forward until its B or W.

        Args:
            sizes: for each stage, what one micro-batch's activations take (bytes, say); by default 1 each, so that
                the result counts stages times micro-batches. Divide that by v for whole micro-batches.
        """
        peaks = []
        for spans in self.spans:
            held = peak = 0.0
            for span in spans:
                size = 1.0 if sizes is None else sizes[span.action.stage]
                if span.action.kind is Kind.FORWARD:
                    held += size
                    peak = max(peak, held)
                elif span.action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                    held -= size
            peaks.append(peak)
        return peaks
