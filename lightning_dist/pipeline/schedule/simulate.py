"""Run a schedule on a clock, without computing anything.

The rules of time are those that the executor has to keep:

- a rank does its actions in order, one at a time;
- a compute action starts when its rank is free and what it takes from the neighbouring stage has arrived;
- RECV only posts a receive and costs nothing: waiting is left to the action that needs it;
- SEND waits until its receive is posted (a rendezvous); from then on the message is under way by itself for
  `transfer` units of time, and the rank goes on;
- hooks cost nothing.

A schedule without communication can be run as well: then what a stage makes is simply at its neighbour `transfer` units
later. Whether a run comes to its end depends on the order of actions alone, not on their times: one run that ends
proves that none can hang.
"""

from collections.abc import Callable, Sequence

from lightning_dist.pipeline.schedule.actions import (
    COMPUTE,
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
from lightning_dist.pipeline.schedule.spans import Span, Timeline

Cost = Callable[[Action], float]
"""The time that a compute action takes."""


def cost_of_stages(times: Times | Sequence[Times], *, virtual_stages: int = 1) -> Cost:
    """Costs that depend on stage and kind alone.

    Args:
        times: of a micro-batch, one `Times` for each stage; a single one is the time on all stages of a rank.
        virtual_stages: the stages of a rank that share a single `times` evenly.
    """

    def cost(action: Action) -> float:
        stage = times if isinstance(times, Times) else times[action.stage]
        share = virtual_stages if isinstance(times, Times) else 1
        if action.kind is Kind.FORWARD:
            return stage.forward / share
        if action.kind is Kind.BACKWARD:
            return stage.backward / share
        return (stage.input_grad if action.kind is Kind.INPUT_GRAD else stage.weight_grad) / share

    return cost


def simulate(schedule: Schedule, cost: Cost, *, transfer: float = 0.0) -> Timeline:
    """The timeline of a schedule, lowered or not.

    Args:
        cost: time of each compute action, at least 0; see `cost_of_stages`.
        transfer: time of a message between two ranks, in the same unit.

    Raises:
        InvalidScheduleError: no rank can go on; the message shows who waits for whom.
    """
    run = _Run(schedule, cost, transfer)
    advanced = True
    while advanced:
        advanced = False
        for rank in range(len(schedule)):
            advanced |= run.advance(rank)
    if run.blocked_ranks():
        raise InvalidScheduleError(run.explain_deadlock())
    return Timeline(run.spans)


class _Run:
    """The state of a simulation: how far each rank is, and what has been made, posted and sent."""

    def __init__(self, schedule: Schedule, cost: Cost, transfer: float) -> None:
        self.schedule = schedule
        self.cost = cost
        self.transfer = transfer
        self.owners = stage_owners(schedule)
        self.num_stages = 1 + max(self.owners, default=-1)
        self.is_lowered = any(action.kind in SENDS for actions in schedule for action in actions)
        self.position = [0] * len(schedule)
        self.clock = [0.0] * len(schedule)
        self.spans: list[list[Span]] = [[] for _ in schedule]
        self.arrived: dict[Fact, float] = {}  # at the rank that consumes it
        self.made: set[Fact] = set()
        self.posted: dict[Fact, float] = {}

    def advance(self, rank: int) -> bool:
        """Do what the rank can do now; whether there was anything."""
        actions, first = self.schedule[rank], self.position[rank]
        while self.position[rank] < len(actions) and self.try_action(rank, actions[self.position[rank]]):
            self.position[rank] += 1
        return self.position[rank] > first

    def try_action(self, rank: int, action: Action) -> bool:
        if action.kind in COMPUTE:
            return self.try_compute(rank, action)
        if action.kind in SENDS:
            return self.try_send(rank, action)
        if action.kind in RECEIVES:
            self.posted[received_as(action)] = self.clock[rank]
        return True

    def try_compute(self, rank: int, action: Action) -> bool:
        need = received_by(action, self.num_stages)
        if need is not None and need not in self.arrived:
            return False
        start = self.clock[rank] if need is None else max(self.clock[rank], self.arrived[need])
        end = start + self.cost(action)
        self.spans[rank].append(Span(action, start, end))
        self.clock[rank] = end
        fact = made_by(action)
        if fact is not None:
            self.made.add(fact)
            is_local = self.owners.get(consumer_stage(fact)) == rank
            if is_local or not self.is_lowered:
                self.arrived[fact] = end if is_local else end + self.transfer
        return True

    def try_send(self, rank: int, action: Action) -> bool:
        fact = sent_by(action)
        if fact not in self.posted or fact not in self.made:
            return False
        start = self.clock[rank]
        meeting = max(start, self.posted[fact])
        if meeting > start:
            self.spans[rank].append(Span(action, start, meeting))
        self.clock[rank] = meeting
        self.arrived[fact] = meeting + self.transfer
        return True

    def blocked_ranks(self) -> list[int]:
        return [rank for rank, actions in enumerate(self.schedule) if self.position[rank] < len(actions)]

    def explain_deadlock(self) -> str:
        """Who waits for whom: the circle, if following the waits from the first blocked rank leads into one."""
        path: list[int] = []
        rank: int | None = self.blocked_ranks()[0]
        sentences = []
        while rank is not None and rank not in path:
            path.append(rank)
            sentence, rank = self.explain_wait(rank)
            sentences.append(sentence)
        if rank is not None:
            sentences = sentences[path.index(rank) :]
        return "the schedule hangs: " + "; ".join(sentences)

    def explain_wait(self, rank: int) -> tuple[str, int | None]:
        """What a blocked rank waits for, and the rank that should do it (None where nobody will)."""
        position = self.position[rank]
        action = self.schedule[rank][position]
        awaited: tuple[Action, ...]
        if action.kind in SENDS:
            fact = sent_by(action)
            if fact not in self.made:
                awaited = self.makers(fact)
            else:
                awaited = (receive_of(fact),)
        else:
            need = received_by(action, self.num_stages)
            assert need is not None
            is_remote = self.owners.get(need.stage) != rank
            awaited = (send_of(need),) if self.is_lowered and is_remote else self.makers(need)
        where = f"rank {rank}, position {position}, {action} waits for "
        for other, actions in enumerate(self.schedule):
            for later in range(self.position[other], len(actions)):
                if actions[later] in awaited:
                    return f"{where}{actions[later]} (rank {other}, position {later})", other
        return f"{where}{' or '.join(map(str, awaited))}, which no rank does", None

    def makers(self, fact: Fact) -> tuple[Action, ...]:
        kinds = (Kind.FORWARD,) if fact.forward else (Kind.BACKWARD, Kind.INPUT_GRAD)
        return tuple(Action(kind, fact.stage, fact.micro_batch) for kind in kinds)
