"""Where the weight gradients go: into the gaps.

Given the order in which each rank does its forwards and input gradients, a clock is run in which every action takes
one unit (F = I = W). At each tick a rank does the next action of its order if that can run; otherwise it uses the tick
for a weight gradient that is due. A weight gradient comes first only where memory demands it: a micro-batch's
activations are held until its W, so a rank that holds as many as it may must do a W before its next F.

In equal units this is the best that can be made of the given orders: a W takes exactly one tick that would have been
idle, or that memory would have claimed anyway. The method is that of the handcrafted schedules of Qi et al. 2024
(arXiv 2401.10241, sec. 2), written as a procedure so that it holds for any number of micro-batches.
"""

from collections import deque
from collections.abc import Sequence

from lightning_dist.pipeline.schedule.actions import Action, Kind, Schedule
from lightning_dist.pipeline.schedule.graph import Fact, made_by, received_by


def insert_weight_gradients(orders: Schedule, max_live: int) -> list[list[Action]]:
    """Complete the `orders` of F and I with one W for each I.

    Args:
        orders: for each rank its forwards and input gradients.
        max_live: activations that a rank may hold, in stages times micro-batches.

    Raises:
        ValueError: the orders cannot run within `max_live`.
    """
    num_stages = 1 + max(action.stage for actions in orders for action in actions)
    schedule: list[list[Action]] = [[] for _ in orders]
    position = [0] * len(orders)
    live = [0] * len(orders)
    due: list[deque[Action]] = [deque() for _ in orders]
    facts: set[Fact] = set()
    remaining = 2 * sum(action.kind is Kind.FORWARD for actions in orders for action in actions)
    remaining += remaining // 2
    while remaining:
        made: list[Fact] = []
        before = remaining
        for rank, order in enumerate(orders):
            action = _next_action(order, position[rank], live[rank] >= max_live, facts, num_stages)
            if action is not None:
                position[rank] += 1
            elif due[rank]:
                action = due[rank].popleft()
            else:
                continue
            schedule[rank].append(action)
            remaining -= 1
            if action.kind is Kind.WEIGHT_GRAD:
                live[rank] -= 1
                continue
            if action.kind is Kind.FORWARD:
                live[rank] += 1
            else:
                due[rank].append(Action(Kind.WEIGHT_GRAD, action.stage, action.micro_batch))
            fact = made_by(action)
            assert fact is not None
            made.append(fact)
        if remaining == before:
            raise ValueError(f"the orders cannot run with {max_live} live activations on a rank")
        facts.update(made)  # seen from the next tick on
    return schedule


def _next_action(
    order: Sequence[Action], position: int, full: bool, facts: set[Fact], num_stages: int
) -> Action | None:
    if position == len(order):
        return None
    action = order[position]
    if full and action.kind is Kind.FORWARD:
        return None
    need = received_by(action, num_stages)
    return action if need is None or need in facts else None
