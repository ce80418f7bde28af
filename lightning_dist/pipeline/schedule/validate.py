"""Prove that a schedule is right before any rank runs it.

In this order, and the first thing that is wrong is the error:

1. each stage is on one rank, and no stage is missing;
2. each stage and micro-batch has F, and either B or both I and W, exactly once;
3. on each rank F comes before B or I, and I before W;
4. lowered schedules: each result that another rank needs is sent once, behind its maker, and received once, ahead of
   its user; for any two ranks sends and receives come in the same order; a stage is used between UNSHARD and RESHARD,
   and REDUCE comes when its weight gradients are complete;
5. the schedule comes to its end with rendezvous sends (`simulate`), so it cannot hang;
6. no rank holds more activations than it may.

Positions in messages are counted from 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dist.pipeline.schedule.actions import (
    COMPUTE,
    HOOKS,
    RECEIVES,
    SENDS,
    Action,
    InvalidScheduleError,
    Kind,
    Schedule,
)
from lightning_dist.pipeline.schedule.closed_forms import Times
from lightning_dist.pipeline.schedule.graph import (
    Fact,
    consumer_stage,
    made_by,
    receive_of,
    received_as,
    received_by,
    send_of,
    sent_by,
    stage_owners,
)
from lightning_dist.pipeline.schedule.simulate import cost_of_stages, simulate

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
_ENDS = (Kind.BACKWARD, Kind.WEIGHT_GRAD)  # after these a micro-batch's activations are released


@dataclass(frozen=True)
class Proof:
    """What a valid schedule is made of.

    Attributes:
        owners: stage -> rank.
        peak_live: for each rank the most activations held, in stages times micro-batches.
        receive_buffers: for each rank the most receives that are posted and not yet used; 0 if not lowered.
    """

    num_ranks: int
    num_stages: int
    num_micro_batches: int
    owners: Mapping[int, int]
    peak_live: Sequence[int]
    receive_buffers: Sequence[int]


def validate(
    schedule: Schedule,
    *,
    num_micro_batches: int | None = None,
    owners: Mapping[int, int] | None = None,
    max_live: Sequence[int] | None = None,
) -> Proof:
    """Prove a schedule, lowered or not.

    Args:
        num_micro_batches: how many there must be; None to take what the schedule has.
        owners: which rank must hold which stage; None to take it from the schedule.
        max_live: for each rank the most activations that it may hold, in stages times micro-batches.

    Raises:
        InvalidScheduleError: what is wrong, with rank, position and action.
    """
    places = _Places(schedule, owners, num_micro_batches)
    places.check_stages()
    places.check_complete()
    places.check_local_order()
    if any(action.kind not in COMPUTE for actions in schedule for action in actions):
        places.check_messages()
        places.check_hooks()
    simulate(schedule, cost_of_stages(Times()))
    peak_live = [_peak(actions, rank, max_live) for rank, actions in enumerate(schedule)]
    return Proof(
        num_ranks=len(schedule),
        num_stages=places.num_stages,
        num_micro_batches=places.num_micro_batches,
        owners=places.owners,
        peak_live=peak_live,
        receive_buffers=[places.receive_buffers(rank) for rank in range(len(schedule))],
    )


class _Places:
    """Where each action stands, and the checks that need no clock."""

    def __init__(self, schedule: Schedule, owners: Mapping[int, int] | None, num_micro_batches: int | None) -> None:
        self.schedule = schedule
        self.owners = dict(owners) if owners is not None else stage_owners(schedule)
        micro_batches = [
            action.micro_batch for actions in schedule for action in actions if action.micro_batch is not None
        ]
        self.num_micro_batches = num_micro_batches or 1 + max(micro_batches, default=-1)
        self.num_stages = 1 + max(self.owners, default=-1)
        self.at: dict[Action, tuple[int, int]] = {}  # rank, position
        for rank, actions in enumerate(schedule):
            for position, action in enumerate(actions):
                if action in self.at:
                    other, before = self.at[action]
                    raise self.error(rank, position, f"stands at rank {other}, position {before} already")
                self.at[action] = rank, position

    def error(self, rank: int, position: int, what: str) -> InvalidScheduleError:
        return InvalidScheduleError(f"rank {rank}, position {position}, {self.schedule[rank][position]}: {what}")

    def check_stages(self) -> None:
        if not self.owners:
            raise InvalidScheduleError("the schedule computes nothing")
        for rank, actions in enumerate(self.schedule):
            for position, action in enumerate(actions):
                owner = self.owners.get(action.stage)
                if owner == rank:
                    continue
                held = [str(stage) for stage, holder in self.owners.items() if holder == rank]
                where = f"is on rank {owner}" if owner is not None else "is on no rank"
                have = f"has stage {', '.join(held)}" if held else "has none"
                raise self.error(rank, position, f"stage {action.stage} {where}; rank {rank} {have}")
        for stage in range(self.num_stages):
            if stage not in self.owners:
                raise InvalidScheduleError(f"no rank computes stage {stage} of {self.num_stages}")

    def check_complete(self) -> None:
        for rank, actions in enumerate(self.schedule):
            for position, action in enumerate(actions):
                if action.micro_batch is not None and action.micro_batch >= self.num_micro_batches:
                    raise self.error(rank, position, f"there are only {self.num_micro_batches} micro-batches, from 0")
        for stage, rank in self.owners.items():
            for micro_batch in range(self.num_micro_batches):
                self.check_complete_cell(stage, rank, micro_batch)

    def check_complete_cell(self, stage: int, rank: int, micro_batch: int) -> None:
        forward = Action(Kind.FORWARD, stage, micro_batch)
        if forward not in self.at:
            raise InvalidScheduleError(
                f"rank {rank} lacks {forward}: stage {stage} never sees micro-batch {micro_batch}"
            )
        whole, *halves = (Action(kind, stage, micro_batch) for kind in _BACKWARDS)
        missing = [half for half in halves if half not in self.at]
        if whole in self.at:
            for half in halves:
                if half in self.at:
                    raise self.error(*self.at[half], f"{whole} at position {self.at[whole][1]} includes it")
        elif len(missing) == 1:
            other = next(half for half in halves if half in self.at)
            raise InvalidScheduleError(
                f"rank {rank} lacks {missing[0]}: it has {other} at position {self.at[other][1]}, half of a backward"
            )
        elif missing:
            raise InvalidScheduleError(
                f"rank {rank} lacks {whole} (or {halves[0]} and {halves[1]}): micro-batch {micro_batch} has no "
                f"backward on stage {stage}"
            )

    def check_local_order(self) -> None:
        for action, (rank, position) in self.at.items():
            if action.kind not in _BACKWARDS:
                continue
            first = Kind.INPUT_GRAD if action.kind is Kind.WEIGHT_GRAD else Kind.FORWARD
            need = Action(first, action.stage, action.micro_batch)
            if self.at[need][1] > position:
                raise self.error(rank, position, f"needs {need}, which comes later, at position {self.at[need][1]}")

    def check_messages(self) -> None:
        expected: set[Action] = set()
        for action, (rank, position) in self.at.items():
            if action.kind not in COMPUTE:
                continue
            made, needed = made_by(action), received_by(action, self.num_stages)
            if made is not None and self.is_message(made):
                send = send_of(made)
                expected.add(send)
                if send not in self.at:
                    raise self.error(rank, position, f"its result is never sent: {send} is missing on rank {rank}")
                if self.at[send][1] < position:
                    raise self.error(*self.at[send], f"sends what is made later, at position {position}")
            if needed is not None and self.is_message(needed):
                receive = receive_of(needed)
                expected.add(receive)
                if receive not in self.at:
                    raise self.error(rank, position, f"needs {receive} ahead of it, which is missing on rank {rank}")
                if self.at[receive][1] > position:
                    raise self.error(
                        rank, position, f"needs {receive}, which comes later, at position {self.at[receive][1]}"
                    )
        for action, (rank, position) in self.at.items():
            if action.kind in SENDS | RECEIVES and action not in expected:
                raise self.error(rank, position, "no other rank takes part in this message")
        self.check_pairs()

    def is_message(self, fact: Fact) -> bool:
        consumer = self.owners.get(consumer_stage(fact))
        return consumer is not None and consumer != self.owners[fact.stage]

    def check_pairs(self) -> None:
        """The k-th message that a rank sends to another is the k-th that the other receives from it."""
        sent: dict[tuple[int, int], list[Fact]] = {}
        received: dict[tuple[int, int], list[Fact]] = {}
        for actions in self.schedule:
            for action in actions:
                if action.kind in SENDS:
                    fact, book = sent_by(action), sent
                elif action.kind in RECEIVES:
                    fact, book = received_as(action), received
                else:
                    continue
                pair = self.owners[fact.stage], self.owners[consumer_stage(fact)]
                book.setdefault(pair, []).append(fact)
        for (source, target), facts in sent.items():
            for first, second in zip(facts, received[source, target], strict=True):
                if first != second:
                    receive = receive_of(second)
                    raise self.error(
                        *self.at[receive],
                        f"rank {source} sends {send_of(first)} first (position {self.at[send_of(first)][1]}), "
                        f"so messages from rank {source} to rank {target} would be mixed up",
                    )

    def check_hooks(self) -> None:
        """Hooks are optional, but those that are there must enclose the use of their stage."""
        for stage, rank in self.owners.items():
            uses = [
                i for i, action in enumerate(self.schedule[rank]) if action.stage == stage and action.kind in COMPUTE
            ]
            for kind in HOOKS:
                hook = Action(kind, stage)
                if hook not in self.at:
                    continue
                position = self.at[hook][1]
                if kind is Kind.UNSHARD and position > uses[0]:
                    raise self.error(rank, uses[0], f"uses stage {stage} before {hook} at position {position}")
                if kind is not Kind.UNSHARD and position < uses[-1]:
                    raise self.error(rank, uses[-1], f"uses stage {stage} after {hook} at position {position}")

    def receive_buffers(self, rank: int) -> int:
        posted: set[Fact] = set()
        peak = 0
        for action in self.schedule[rank]:
            if action.kind in RECEIVES:
                posted.add(received_as(action))
                peak = max(peak, len(posted))
            elif action.kind in COMPUTE and (need := received_by(action, self.num_stages)) is not None:
                posted.discard(need)
        return peak


def _peak(actions: Sequence[Action], rank: int, max_live: Sequence[int] | None) -> int:
    live = peak = 0
    for position, action in enumerate(actions):
        live += (action.kind is Kind.FORWARD) - (action.kind in _ENDS)
        peak = max(peak, live)
        if max_live is not None and live > max_live[rank]:
            raise InvalidScheduleError(
                f"rank {rank}, position {position}, {action}: holds the activations of {live} forwards, "
                f"{max_live[rank]} are allowed"
            )
    return peak
