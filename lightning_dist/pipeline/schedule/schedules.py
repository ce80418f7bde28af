"""The schedules, one function each, and the table that names them.

A function takes (num_ranks, num_micro_batches, virtual_stages) and gives, for each rank, its compute actions in order.
Nothing else is needed: `lower` adds the communication, `validate` proves the result, `simulate` times it. A new
schedule is a function and a row of `SCHEDULES`. `docs/pipeline.md` draws them all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_dist.core.errors import ConfigurationError
from lightning_dist.pipeline.schedule import closed_forms as forms
from lightning_dist.pipeline.schedule.actions import Action, Kind
from lightning_dist.pipeline.schedule.closed_forms import Idle, Live, Shape, Times, group_sizes
from lightning_dist.pipeline.schedule.placement import Placement
from lightning_dist.pipeline.schedule.weight_gradients import insert_weight_gradients


def gpipe(num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> list[list[Action]]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965): simple, holds all m activations."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [
        [Action(kind, rank, micro_batch) for kind in kinds for micro_batch in range(num_micro_batches)]
        for rank in range(num_ranks)
    ]


def one_f_one_b(num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> list[list[Action]]:
    """One forward, one backward, in turn: the bubble of gpipe with at most p activations.

    PipeDream-flush (Narayanan et al. 2021, arXiv 2006.09503), the default of Megatron-LM (arXiv 2104.04473, fig. 4).
    """
    return [_one_f_one_b_order(rank, num_ranks, num_micro_batches, Kind.BACKWARD) for rank in range(num_ranks)]


def interleaved(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[list[Action]]:
    """1F1B over v stages on each rank: the bubble is v times smaller, and there are v times the messages.

    Narayanan et al. 2021 (arXiv 2104.04473, sec. 2.2). Micro-batches pass the ranks in groups: a group goes through the
    first stages of all ranks, then through the second ones, and so on. Before its first backward a rank does the
    forwards of v-1 turns of a group and of twice its distance to the last rank. The paper wants p to divide m; here
    groups may be larger than p (`group_sizes`), so any m works, with the bubble of the closed form.
    """
    if virtual_stages == 1:
        return one_f_one_b(num_ranks, num_micro_batches)
    turns = range(virtual_stages)
    forwards: list[tuple[int, int]] = []  # (turn, micro-batch), the same on all ranks
    start = 0
    for size in group_sizes(num_ranks, num_micro_batches):
        forwards += [(turn, micro_batch) for turn in turns for micro_batch in range(start, start + size)]
        start += size
    backwards = [(virtual_stages - 1 - turn, micro_batch) for turn, micro_batch in forwards]
    largest_group = max(group_sizes(num_ranks, num_micro_batches))
    schedule = []
    for rank in range(num_ranks):
        ahead = min((virtual_stages - 1) * largest_group + 2 * (num_ranks - 1 - rank), len(forwards))
        schedule.append(
            _in_turn(
                [Action(Kind.FORWARD, turn * num_ranks + rank, micro_batch) for turn, micro_batch in forwards],
                [Action(Kind.BACKWARD, turn * num_ranks + rank, micro_batch) for turn, micro_batch in backwards],
                ahead,
            )
        )
    return schedule


def zb_h1(num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> list[list[Action]]:
    """1F1B whose weight gradients wait for the gaps: a third of the bubble at the memory of 1F1B's first rank.

    Qi et al. 2024 (arXiv 2401.10241, sec. 2.1).
    """
    orders = [_one_f_one_b_order(rank, num_ranks, num_micro_batches, Kind.INPUT_GRAD) for rank in range(num_ranks)]
    return insert_weight_gradients(orders, max_live=num_ranks)


def zbv(num_ranks: int, num_micro_batches: int, virtual_stages: int = 2) -> list[list[Action]]:
    """Two stages on each rank, placed in a V, and a split backward: no bubble at the memory of 1F1B.

    Qi et al. 2024 (arXiv 2401.10241, ZB-V), for F = I = W. With a = r and b = 2p-1-r the stages of rank r, its order of
    forwards and input gradients follows from when things can first arrive::

        2(p-r)-1 times   F(a)              until the first micro-batch comes back up the V
        r times          F(b) F(a)         until its gradient arrives
        p-r times        F(b) I(b)         until the gradient arrives at a
        then             F(a) I(a) F(b) I(b), without what has run out
    """
    schedule = [_zbv_order(rank, num_ranks, num_micro_batches) for rank in range(num_ranks)]
    return insert_weight_gradients(schedule, max_live=2 * num_ranks)


def _one_f_one_b_order(rank: int, num_ranks: int, num_micro_batches: int, backward: Kind) -> list[Action]:
    return _in_turn(
        [Action(Kind.FORWARD, rank, micro_batch) for micro_batch in range(num_micro_batches)],
        [Action(backward, rank, micro_batch) for micro_batch in range(num_micro_batches)],
        ahead=min(num_ranks - 1 - rank, num_micro_batches),
    )


def _in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    steady = len(forwards) - ahead
    actions = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards[:steady], strict=True):
        actions += [forward, backward]
    return actions + backwards[steady:]


def _zbv_order(rank: int, num_ranks: int, num_micro_batches: int) -> list[Action]:
    down, up = rank, 2 * num_ranks - 1 - rank
    streams: dict[tuple[Kind, int], Iterator[Action]] = {
        (kind, stage): iter([Action(kind, stage, micro_batch) for micro_batch in range(num_micro_batches)])
        for kind in (Kind.FORWARD, Kind.INPUT_GRAD)
        for stage in (down, up)
    }
    forward_down, forward_up = (Kind.FORWARD, down), (Kind.FORWARD, up)
    grad_down, grad_up = (Kind.INPUT_GRAD, down), (Kind.INPUT_GRAD, up)
    pattern = [forward_down] * (2 * (num_ranks - rank) - 1)
    pattern += [forward_up, forward_down] * rank
    pattern += [forward_up, grad_up] * (num_ranks - rank)
    pattern += [forward_down, grad_down, forward_up, grad_up] * num_micro_batches
    return [action for key in pattern if (action := next(streams[key], None)) is not None]


@dataclass(frozen=True)
class ScheduleRow:
    """One schedule of the table.

    Attributes:
        build: the function.
        placement: which rank holds which stage.
        virtual_stages: what v may be: the one number, or None for any.
        idle: idle time of a step by formula (`closed_forms`).
        idle_overlapped: the same where no rank waits for the others between two steps.
        live: the most activations that a rank holds, in stages times micro-batches; a bound that is reached.
    """

    build: Callable[[int, int, int], list[list[Action]]]
    placement: Placement
    virtual_stages: int | None
    idle: Idle
    idle_overlapped: Idle
    live: Live

    def bubble_ratio(self, shape: Shape, times: Times | None = None) -> float:
        """Idle time over ideal time; for 1f1b (p-1)/m."""
        times = times or Times()
        return self.idle(shape, times) / (shape.num_micro_batches * times.whole)

    def bubble_share(self, shape: Shape, times: Times | None = None) -> float:
        """Idle time over the whole step's; for 1f1b (p-1)/(m+p-1)."""
        ratio = self.bubble_ratio(shape, times)
        return ratio / (1 + ratio)


SCHEDULES: dict[str, ScheduleRow] = {
    "gpipe": ScheduleRow(
        gpipe, Placement.LINEAR, 1, forms.idle_of_full_ramp, forms.idle_of_full_ramp, forms.live_gpipe
    ),
    "1f1b": ScheduleRow(
        one_f_one_b, Placement.LINEAR, 1, forms.idle_of_full_ramp, forms.idle_of_full_ramp, forms.live_one_f_one_b
    ),
    "interleaved": ScheduleRow(
        interleaved,
        Placement.LOOPED,
        None,
        forms.idle_interleaved,
        forms.idle_interleaved,
        forms.live_interleaved,
    ),
    "zb_h1": ScheduleRow(
        zb_h1, Placement.LINEAR, 1, forms.idle_zb_h1, forms.idle_zb_h1, forms.live_zero_bubble
    ),
    "zbv": ScheduleRow(
        zbv, Placement.V_SHAPED, 2, forms.idle_zbv, forms.idle_overlapped_zbv, forms.live_zero_bubble
    ),
}  # fmt: skip
"""Name -> schedule."""


def default_virtual_stages(name: str) -> int:
    """What v is where nobody says: the number that the schedule needs, or 2 for interleaved."""
    return schedule_row(name).virtual_stages or 2


def schedule_row(name: str) -> ScheduleRow:
    """The row of a schedule.

    Raises:
        ConfigurationError: no schedule has this name.
    """
    if name not in SCHEDULES:
        raise ConfigurationError(
            f"schedule={name!r} is not known; use {', '.join(map(repr, SCHEDULES))}, or load your own from a file"
        )
    return SCHEDULES[name]


def build_schedule(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None = None
) -> list[list[Action]]:
    """The compute actions of each rank under a schedule of the table.

    Args:
        virtual_stages: stages on each rank; None for `default_virtual_stages`.

    Raises:
        ConfigurationError: an unknown name, a size below 1, or a number of stages that the schedule does not have.
    """
    row = schedule_row(name)
    if virtual_stages is None:
        virtual_stages = default_virtual_stages(name)
    for what, size in (
        ("num_ranks", num_ranks),
        ("num_micro_batches", num_micro_batches),
        ("virtual_stages", virtual_stages),
    ):
        if size < 1:
            raise ConfigurationError(f"{what}={size} is not a size; use 1 or more")
    if row.virtual_stages is not None and virtual_stages != row.virtual_stages:
        raise ConfigurationError(
            f"virtual_stages={virtual_stages} does not go with schedule={name!r}, which has {row.virtual_stages} on "
            f'each rank; use virtual_stages={row.virtual_stages}, or schedule="interleaved"'
        )
    return row.build(num_ranks, num_micro_batches, virtual_stages)
