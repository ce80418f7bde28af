"""What was sent: calls and bytes by axis, collective and purpose.

Bytes are those that a rank sends in the ring algorithm, whatever the backend does inside, so they can be held
against the papers: an all-gather or a reduce-scatter of B bytes over N ranks costs B * (N - 1) / N, an
all-reduce twice that, a broadcast B from its source.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """Key of a ledger line: on which axis, by which collective, for what."""

    axis: str
    collective: str
    purpose: str


class Ledger:
    """Counts calls and bytes; `snapshot` and `since` measure a span of them."""

    def __init__(self) -> None:
        self.calls: Counter[Entry] = Counter()
        self.bytes: Counter[Entry] = Counter()

    def record(self, axis: str, collective: str, purpose: str, num_bytes: int) -> None:
        """Book one call."""
        entry = Entry(axis, collective, purpose)
        self.calls[entry] += 1
        self.bytes[entry] += num_bytes

    def total(self, *, axis: str | None = None, collective: str | None = None, purpose: str | None = None) -> int:
        """Bytes of all lines that match; None matches everything."""
        return sum(n for entry, n in self.bytes.items() if _matches(entry, axis, collective, purpose))

    def count(self, *, axis: str | None = None, collective: str | None = None, purpose: str | None = None) -> int:
        """Calls of all lines that match; None matches everything."""
        return sum(n for entry, n in self.calls.items() if _matches(entry, axis, collective, purpose))

    @contextmanager
    def measure(self) -> Iterator["Ledger"]:
        """A ledger that, when the block ends, holds only what the block sent."""
        calls, sent, span = Counter(self.calls), Counter(self.bytes), Ledger()
        try:
            yield span
        finally:
            span.calls, span.bytes = self.calls - calls, self.bytes - sent


def _matches(entry: Entry, axis: str | None, collective: str | None, purpose: str | None) -> bool:
    wanted = (axis, collective, purpose)
    return all(
        w is None or w == have for w, have in zip(wanted, (entry.axis, entry.collective, entry.purpose), strict=True)
    )
