"""What an action needs before it can run, and who holds which stage.

Through the stages 0, 1, ..., S-1 a micro-batch goes forward and its gradient back::

    F(s)  needs  F(s-1)                              the output of the stage before
    B(s)  needs  F(s)  and  B(s+1) or I(s+1)         the gradient of its own output
    I(s)  needs  F(s)  and  B(s+1) or I(s+1)
    W(s)  needs  I(s)

Two facts carry everything: "the output of stage s exists" (made by F) and "the gradient of the input of stage s
exists" (made by B or I). Lowering, validation and simulation all speak of these.
"""

from collections import Counter
from typing import NamedTuple

from lightning_dist.pipeline.schedule.actions import COMPUTE, Action, Kind, Schedule


class Fact(NamedTuple):
    """`forward`: the output of a stage for a micro-batch; otherwise the gradient of the stage's input."""

    forward: bool
    stage: int
    micro_batch: int


def made_by(action: Action) -> Fact | None:
    """What a compute action leaves behind for other stages; None for W."""
    assert action.micro_batch is not None
    if action.kind is Kind.WEIGHT_GRAD:
        return None
    return Fact(action.kind is Kind.FORWARD, action.stage, action.micro_batch)


def received_by(action: Action, num_stages: int) -> Fact | None:
    """What a compute action takes from the neighbouring stage; None at the ends of the chain and for W."""
    assert action.micro_batch is not None
    if action.kind is Kind.WEIGHT_GRAD:
        return None
    if action.kind is Kind.FORWARD:
        return Fact(True, action.stage - 1, action.micro_batch) if action.stage > 0 else None
    return Fact(False, action.stage + 1, action.micro_batch) if action.stage < num_stages - 1 else None


def consumer_stage(fact: Fact) -> int:
    """The stage that a fact is for."""
    return fact.stage + 1 if fact.forward else fact.stage - 1


def send_of(fact: Fact) -> Action:
    """The action that sends a fact, on the rank that made it."""
    kind = Kind.SEND_FORWARD if fact.forward else Kind.SEND_BACKWARD
    return Action(kind, fact.stage, fact.micro_batch)


def receive_of(fact: Fact) -> Action:
    """The action that receives a fact, on the rank of the stage that it is for."""
    kind = Kind.RECV_FORWARD if fact.forward else Kind.RECV_BACKWARD
    return Action(kind, consumer_stage(fact), fact.micro_batch)


def sent_by(action: Action) -> Fact:
    """The fact behind a SEND."""
    assert action.micro_batch is not None
    return Fact(action.kind is Kind.SEND_FORWARD, action.stage, action.micro_batch)


def received_as(action: Action) -> Fact:
    """The fact behind a RECV."""
    assert action.micro_batch is not None
    forward = action.kind is Kind.RECV_FORWARD
    return Fact(forward, action.stage - 1 if forward else action.stage + 1, action.micro_batch)


def stage_owners(schedule: Schedule) -> dict[int, int]:
    """Stage -> the rank that computes it, in the order of stages.

    If several ranks do, it is the one with most of its actions: the others are mistakes that `validate` reports.
    """
    votes: dict[int, Counter[int]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.kind in COMPUTE:
                votes.setdefault(action.stage, Counter())[rank] += 1
    return {stage: votes[stage].most_common(1)[0][0] for stage in sorted(votes)}
