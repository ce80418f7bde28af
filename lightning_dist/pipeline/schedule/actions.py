"""A schedule is data: for each rank, the list of actions that it carries out in order.

Computation is four kinds of action on one stage and one micro-batch. A backward is either whole (`B`) or split in
two (Qi et al. 2024, arXiv 2401.10241): `I` computes the gradient of the stage's input, which the stage before waits
for; `W` computes the gradients of the weights, which nothing waits for and which may therefore fill a gap::

    F  forward          B  backward = I + W
    I  input gradient   W  weight gradient

Communication and hooks are added by `lower`. The stage of a communication is that of the rank which acts::

    SEND_F1.3   stage 1 sends the output of micro-batch 3 to stage 2, where RECV_F2.3 receives it
    SEND_B2.3   stage 2 sends the gradient of its input back to stage 1, where RECV_B1.3 receives it
    UNSHARD1    the parameters of stage 1 are about to be used; RESHARD1: they no longer are
    REDUCE1     the weight gradients of stage 1 are complete

The text form of a schedule is one line for each rank, actions separated by blanks; `#` starts a comment.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lightning_dist.core.errors import ConfigurationError


class InvalidScheduleError(ConfigurationError):
    """A schedule that cannot be read, is not complete, or would hang; the message says where."""


class Kind(Enum):
    """What an action does; the value is how it is written."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"

    # The hash of an enum's member is computed in Python from its name; the hash of its place in memory is far
    # cheaper, and actions are hashed a hundred thousand times when schedules are swept. Members are single objects.
    __hash__ = object.__hash__


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
HOOKS = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE})


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank: `kind` on a stage (counted from 0 over the whole model) and a micro-batch.

    `micro_batch` is None for the three hooks, which concern a stage as a whole.
    """

    kind: Kind
    stage: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        suffix = "" if self.micro_batch is None else f".{self.micro_batch}"
        return f"{self.kind.value}{self.stage}{suffix}"


Schedule = Sequence[Sequence[Action]]
"""For each rank, its actions in order."""

_ACTION = re.compile(r"([A-Z_]+?)(\d+)(?:\.(\d+))?")
_KINDS = {kind.value: kind for kind in Kind}
_FORMS = (
    "F, B, I or W (or SEND_F, RECV_F, SEND_B, RECV_B) with stage.micro-batch, as in F0.3, "
    "or UNSHARD0, RESHARD0, REDUCE0"
)


def parse_action(text: str) -> Action:
    """Read one action, such as ``F0.3``; the inverse of `str`.

    Raises:
        InvalidScheduleError: the text is not an action.
    """
    match = _ACTION.fullmatch(text)
    kind = _KINDS.get(match[1]) if match else None
    if match is None or kind is None:
        raise InvalidScheduleError(f"{text!r} is not an action; write {_FORMS}")
    if (match[3] is None) != (kind in HOOKS):
        problem = "has a micro-batch, but a hook concerns the whole stage" if match[3] else "lacks its micro-batch"
        raise InvalidScheduleError(f"{text!r} {problem}; write {_FORMS}")
    return Action(kind, int(match[2]), None if match[3] is None else int(match[3]))


def parse_schedule(text: str, *, name: str = "schedule") -> list[list[Action]]:
    """Read a schedule: one line for each rank; lines that are empty or only a comment are skipped.

    Args:
        name: what errors call the text, such as the file's path.

    Raises:
        InvalidScheduleError: something is not an action (with its line and column), or there is no line at all.
    """
    ranks = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0]
        words = list(re.finditer(r"\S+", content))
        row = []
        for word in words:
            try:
                row.append(parse_action(word[0]))
            except InvalidScheduleError as error:
                raise InvalidScheduleError(f"{name}, line {number}, column {word.start() + 1}: {error}") from None
        if row:
            ranks.append(row)
    if not ranks:
        raise InvalidScheduleError(f"{name} holds no actions; write one line for each rank, as in F0.0 F0.1 B0.0 B0.1")
    return ranks


def format_schedule(schedule: Schedule) -> str:
    """Write a schedule in the form that `parse_schedule` reads."""
    return "".join(" ".join(map(str, actions)) + "\n" for actions in schedule)


def load_schedule(path: str | Path) -> list[list[Action]]:
    """Read a schedule from a file; validate it before use.

    Raises:
        InvalidScheduleError: as `parse_schedule`; also a file that cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidScheduleError(f"the schedule file {path} cannot be read: {error}") from error
    return parse_schedule(text, name=str(path))
