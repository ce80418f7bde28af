"""When each action of a step ran, on the machine's clock; on a GPU by events, so that measuring waits for nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lightning_dist.pipeline.schedule import Action, Span


@dataclass
class Stopwatch:
    """The spans of the last step."""

    _host: list[Span] = field(default_factory=list)
    _events: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def restart(self) -> None:
        """A new step begins."""
        self._host = []
        self._events = []

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Measure an action."""
        if torch.cuda.is_available():
            start, end = _event(), _event()
            start.record()
            yield
            end.record()
            self._events.append((action, start, end))
            return
        begun = time.perf_counter()
        yield
        self._host.append(Span(action, begun, time.perf_counter()))

    def spans(self) -> list[Span]:
        """In seconds. GPU times are tied to the machine's clock at this moment, when the device has come to rest."""
        if not self._events:
            return list(self._host)
        now = _event()
        now.record()
        torch.cuda.synchronize()
        clock = time.perf_counter()
        return [
            Span(action, clock - start.elapsed_time(now) / 1e3, clock - end.elapsed_time(now) / 1e3)
            for action, start, end in self._events
        ]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
