"""What became of a test, told from what every rank reports.

When one rank fails, its peers fail as well a moment later, because a connection breaks, or wait for it for
ever. The reader wants the cause: the first rank in time whose failure is not such a consequence. It is told
in full, the other ranks in a line each.
"""

from __future__ import annotations

import enum
import os
import re
import signal
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from tests.harness.messages import Kind, Outcome
from tests.harness.stacks import Stack

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|pair closure|socket (was )?closed", re.IGNORECASE
)
LOG_LINES = 30


class Cause(enum.Enum):
    """Why a test failed."""

    RAISED = "raised"
    DIED = "died"
    TIMED_OUT = "timed out"
    DISAGREED = "disagreed"
    LEFT_BROKEN = "left the process group broken"


class RankFailure(pytest.fail.Exception):  # type: ignore[name-defined, misc]
    """A test failed on some rank; the message holds everything that is known about it."""

    def __init__(self, cause: Cause, rank: int | None, message: str) -> None:
        super().__init__(message, pytrace=False)
        self.cause = cause
        self.rank = rank


@dataclass(frozen=True)
class Death:
    """A worker ended: when, with which wait status, and the last lines it printed."""

    when: float
    status: int
    log: str

    def in_words(self) -> str:
        if os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            return f"was killed by signal {number} ({signal.Signals(number).name})"
        return f"ended by itself with exit code {os.WEXITSTATUS(self.status)}"


@dataclass
class Round:
    """One request put to all ranks, and how it went.

    Each rank is in ``outcomes`` if it answered, in ``deaths`` if its process ended instead, in ``stuck`` if
    it did neither before the round was given up.
    """

    world: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    deaths: dict[int, Death] = field(default_factory=dict)
    stuck: dict[int, Stack] = field(default_factory=dict)

    @property
    def pending(self) -> list[int]:
        return [rank for rank in range(self.world) if rank not in self.outcomes and rank not in self.deaths]

    @property
    def in_trouble(self) -> bool:
        """True once some rank cannot finish the test any more: its peers may wait for it in vain."""
        return bool(self.deaths) or any(outcome.kind is Kind.FAILED for outcome in self.outcomes.values())

    def conclude(self, timeout: float, *, place: str = "") -> None:
        """Return if every rank passed; else raise the skip they agree on, or what explains the failure."""
        culprit = self._culprit()
        if culprit is not None:
            raise self._failure(culprit, place)
        if self.stuck:
            raise RankFailure(Cause.TIMED_OUT, None, self._timeout_report(timeout, place))
        kinds = {outcome.kind for outcome in self.outcomes.values()}
        if len(kinds) > 1:
            lines = "\n".join(self._one_line(rank) for rank in range(self.world))
            raise RankFailure(Cause.DISAGREED, None, f"the ranks disagree about the outcome{place}:\n{lines}")
        reason = self.outcomes[0].text
        if kinds == {Kind.SKIPPED}:
            raise pytest.skip.Exception(reason, _use_item_location=True)
        if kinds == {Kind.XFAILED}:
            pytest.xfail(reason)

    def _culprit(self) -> int | None:
        """The rank to blame: first in time among the causes, else among the consequences."""
        failed = {rank: outcome for rank, outcome in self.outcomes.items() if outcome.kind is Kind.FAILED}
        causes = {rank: death.when for rank, death in self.deaths.items()}
        causes |= {rank: outcome.when for rank, outcome in failed.items() if not _CONSEQUENCE.search(outcome.headline)}
        candidates: Mapping[int, float] = causes or {rank: outcome.when for rank, outcome in failed.items()}
        return min(candidates, key=candidates.__getitem__, default=None)

    def _failure(self, rank: int, place: str) -> RankFailure:
        if rank in self.deaths:
            death = self.deaths[rank]
            told = f"rank {rank} of {self.world} {death.in_words()}{place}"
            if death.log:
                told += f"\nthe last it printed:\n{textwrap.indent(death.log, '    ')}"
            cause = Cause.DIED
        else:
            told = f"rank {rank} of {self.world} failed{place}:\n\n{self.outcomes[rank].text}"
            cause = Cause.RAISED
        others = "\n".join(self._one_line(other) for other in range(self.world) if other != rank)
        return RankFailure(cause, rank, f"{told}\n\nthe other ranks:\n{others}" if others else told)

    def _one_line(self, rank: int) -> str:
        if rank in self.deaths:
            return f"  rank {rank} {self.deaths[rank].in_words()}"
        if rank in self.stuck:
            return f"  rank {rank} was still at {self.stuck[rank].position()}"
        outcome = self.outcomes[rank]
        what = f"{outcome.kind.value}: {outcome.headline}" if outcome.headline else outcome.kind.value
        consequence = outcome.kind is Kind.FAILED and _CONSEQUENCE.search(outcome.headline)
        return f"  rank {rank} {what}" + ("  (a consequence)" if consequence else "")

    def _timeout_report(self, timeout: float, place: str) -> str:
        parts = [f"timeout: not finished after {timeout:g} s on ranks {sorted(self.stuck)} of {self.world}{place}"]
        for rank in range(self.world):
            if rank in self.stuck:
                parts.append(f"rank {rank}:\n{self.stuck[rank].text}")
            else:
                parts.append(self._one_line(rank).strip())
        return "\n\n".join(parts)
