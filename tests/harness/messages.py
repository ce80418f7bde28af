"""What travels between pytest and its workers: three requests, one kind of answer.

Everything is made of strings, numbers and bytes, so that a message can always be unpickled on the other side;
arguments and return values of a test travel as bytes and are opened only where their classes are importable.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

BODY_ATTRIBUTE = "__ranks_body__"  # where a decorated test keeps the function that workers run


class Kind(enum.Enum):
    """How one rank got on with one request."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"


@dataclass(frozen=True)
class Prepare:
    """Import the module that holds the test; its time is not counted as the test's."""

    module: str
    search_path: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """Call one function with pickled keyword arguments."""

    module: str
    qualname: str
    arguments: bytes


@dataclass(frozen=True)
class Tidy:
    """All ranks passed: prove that the default group still works, then put the process back in order."""

    turn: int


Request = Prepare | Run | Tidy


@dataclass(frozen=True)
class LocalMonkeyPatch:
    """Stands for pytest's ``monkeypatch`` among the arguments; each worker makes its own and undoes it."""


@dataclass(frozen=True)
class Outcome:
    """One rank's answer to one request.

    ``when`` is read from the monotonic clock, which all processes of a machine share, so that the parent
    can tell which rank failed first. ``text`` is the traceback or the reason, ``headline`` its one-line
    form, ``value`` the pickled return value.
    """

    rank: int
    kind: Kind
    when: float
    headline: str = ""
    text: str = ""
    value: bytes = b""
