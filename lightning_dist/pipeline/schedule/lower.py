"""From compute actions to what a rank really does: sends, receives and hooks.

**Sends** stand right behind the action that makes what they carry.

**Receives** are posted ahead, so that the message travels while the receiver computes and the sender never waits. How
far ahead? Let a clock run in which F = I = W = 1 and B = 2 and messages take no time, and let an action end at time t
whose result goes to another rank. If that rank is then in the middle of an action, or has one that ends just at t, the
receive is posted before that action; if it idles, behind its last one::

    sender      |  F3  | SEND                    time t: the end of F3
    receiver  RECV |  B1  |  F3  |               posted before B1, under way during B1

Thus every receive is reached before time t: at a moment when, of the rank's own sends, only those of earlier times
have to be done. So with rendezvous sends no circle of waiting ranks can close, by induction over the time of the sends.
Earlier still would be no gain: it would only hold a buffer for longer. And for any two ranks both sides name the
messages in order of time, so they match even where messages carry no names.

RECV posts, it does not wait; on a channel where both ends block (a CUDA stream with one communicator for both
directions), give each direction its own.

**Hooks**: UNSHARD before the first action of a stage; RESHARD and REDUCE behind its last one, which completes its
weight gradients. Whoever needs them registers handlers (ZeRO gathers and reduces there).
"""

from bisect import bisect_left
from collections.abc import Sequence

from lightning_dist.pipeline.schedule.actions import COMPUTE, Action, InvalidScheduleError, Kind, Schedule
from lightning_dist.pipeline.schedule.closed_forms import Times
from lightning_dist.pipeline.schedule.graph import consumer_stage, made_by, receive_of, send_of, stage_owners
from lightning_dist.pipeline.schedule.simulate import cost_of_stages, simulate


def lower(schedule: Schedule) -> list[list[Action]]:
    """Add communication and hooks to a schedule of compute actions.

    Raises:
        InvalidScheduleError: the schedule cannot run, or has more than compute actions already.
    """
    for rank, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            if action.kind not in COMPUTE:
                raise InvalidScheduleError(
                    f"rank {rank}, position {position}, {action}: lowering adds sends, receives and hooks itself; "
                    "give it compute actions alone"
                )
    owners = stage_owners(schedule)
    spans = simulate(schedule, cost_of_stages(Times())).spans
    starts = [[span.start for span in row] for row in spans]
    sends: list[dict[int, Action]] = [{} for _ in schedule]  # position of a compute action -> behind it
    receives: list[dict[int, list[tuple[float, int, Action]]]] = [{} for _ in schedule]  # ... -> ahead of it
    for rank, row in enumerate(spans):
        for position, span in enumerate(row):
            fact = made_by(span.action)
            peer = None if fact is None else owners.get(consumer_stage(fact))
            if fact is None or peer is None or peer == rank:
                continue
            sends[rank][position] = send_of(fact)
            ahead_of = bisect_left(starts[peer], span.end)  # the first action that starts at that time or later
            if ahead_of and spans[peer][ahead_of - 1].end >= span.end:
                ahead_of -= 1
            receives[peer].setdefault(ahead_of, []).append((span.end, rank, receive_of(fact)))

    lowered: list[list[Action]] = []
    for rank, actions in enumerate(schedule):
        first, last = _uses(actions)
        row_out: list[Action] = []
        for position in range(len(actions) + 1):
            posted = sorted(receives[rank].get(position, ()), key=lambda entry: entry[:2])
            row_out += [receive for _, _, receive in posted]
            if position and position - 1 in last:
                stage = actions[position - 1].stage
                row_out += [Action(Kind.RESHARD, stage), Action(Kind.REDUCE, stage)]
            if position == len(actions):
                break
            if position in first:
                row_out.append(Action(Kind.UNSHARD, actions[position].stage))
            row_out.append(actions[position])
            if position in sends[rank]:
                row_out.append(sends[rank][position])
        lowered.append(row_out)
    return lowered


def _uses(actions: Sequence[Action]) -> tuple[set[int], set[int]]:
    """Positions at which a stage is used for the first and for the last time."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, action in enumerate(actions):
        first.setdefault(action.stage, position)
        last[action.stage] = position
    return set(first.values()), set(last.values())
