"""How gradients leave: packed as they arrive, reduced while backward goes on, delivered when it ends.

A group's reduce-scatter starts when its gradients are complete. Two signals tell: every parameter has got its
gradient, or backward has passed the inputs of the unit's forward (then the missing ones will never come: an
expert without a token). Since ranks may see these signals at different moments, reductions start in one fixed
order, that in which rank 0 completed them first; whatever is left when backward ends follows in that order. Neither
the number nor the order of collectives depends on a rank's data.

::

    backward      head ..... layer 3 ..... layer 2 ..... layer 1 ..... embedding | end
    network            [head]      [layer 3]      [layer 2]     [layer 1]        [emb] deliver
"""

import zlib
from collections import deque
from collections.abc import Sequence

import torch

from lightning_dist.comm.collectives import Pending
from lightning_dist.comm.rollcall import Place, RollCall
from lightning_dist.core.errors import LightningDistError
from lightning_dist.zero.flat import FlatGroup
from lightning_dist.zero.slot import Slot

MAX_IN_FLIGHT = 2
"""Reductions under way at once: enough to overlap, few enough that unsharded gradients do not pile up."""


class Reducer:
    """Drives the groups' gradients through one backward after another."""

    def __init__(self, groups: Sequence[FlatGroup], rollcall: RollCall) -> None:
        self.groups = list(groups)
        self.rollcall = rollcall
        self.running = False
        self.aside = False  # gradients are left to whoever asked for it; see `aside`
        self._failed = False
        self._in_flight: deque[Pending] = deque()
        self._launched: set[int] = set()
        self._orders: dict[tuple[int, ...], list[int]] = {}

    def begin(self, *, reducing: bool) -> None:
        """A backward begins; with `reducing` its gradients go to the ranks, else they are only summed here."""
        if self._failed:
            self._settle()
        self.running, self.reducing = True, reducing
        for group in self.groups:
            group.forget_zeroed()
            for slot in group.slots:
                if slot.fragment is not slot.parameter:
                    slot.parameter.grad = None  # autograd would add to the stand-in
        self._active = [i for i, group in enumerate(self.groups) if group.trains]
        key = tuple(self._active)
        if reducing:
            trained = [slot.name for i in self._active for slot in self.groups[i].slots if slot.parameter.requires_grad]
            digest = zlib.crc32("\n".join(trained).encode())
            self.rollcall.call(Place.BACKWARD_BEGIN, digest, what=f"that trains {len(trained)} parameters")
        self._order_known = key in self._orders
        self._order = self._orders.get(key, list(reversed(self._active)))
        self._next = 0
        self._completed: list[int] = []
        self._awaited = {i: {s for s in self.groups[i].slots if s.parameter.requires_grad} for i in self._active}
        self._index = {id(self.groups[i]): i for i in self._active}
        self._launched.clear()

    def take(self, slot: Slot) -> bool:
        """Autograd has put a gradient into a parameter. Returns whether its group now has all of them.

        Raises:
            LightningDistError: outside of a backward that this object knows of, or after the group has left.
        """
        group, gradient = slot.group, slot.parameter.grad
        if gradient is None or self.aside:
            return False
        if not self.running:
            raise LightningDistError(
                f"{slot.name} received a gradient outside of the strategy's backward: call self.manual_backward(loss) "
                "(or engine.backward(loss) in a plain loop) in place of loss.backward()"
            )
        index = self._index.get(id(group))
        if index is None or index in self._launched:
            raise LightningDistError(
                f"{slot.name} received a second gradient after those of its unit were sent. Reentrant activation "
                "checkpointing of a layer that is used in several places does this; pass use_reentrant=False"
            )
        group.pack(slot, gradient, accumulates=not self.reducing)
        if slot.fragment is not slot.parameter:
            slot.parameter.grad = None
        self._awaited[index].discard(slot)
        return not self._awaited[index]

    def awaited(self, group: FlatGroup) -> set[Slot]:
        """Parameters of the group whose gradient has not come in this backward."""
        index = self._index.get(id(group))
        return set() if index is None else self._awaited[index]

    def complete(self, group: FlatGroup) -> None:
        """No more gradients of this group will come; start every reduction whose turn it is."""
        index = self._index.get(id(group))
        if not self.running or index is None or index in self._completed:
            return
        self._completed.append(index)
        self._advance()

    def _advance(self) -> None:
        done = set(self._completed)
        while self.reducing and self._next < len(self._order) and self._order[self._next] in done:
            index = self._order[self._next]
            self._next += 1
            self._launched.add(index)
            self._in_flight.append(self.groups[index].start_reduce())
            if len(self._in_flight) > MAX_IN_FLIGHT:
                self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        """A peer that has not started this reduction may be waiting for this rank to take part in a gather."""
        self.rollcall.ask(Place.REDUCE)
        self._in_flight.popleft().wait()

    def end(self) -> None:
        """Backward is over: send what is left, wait for all of it, and deliver the gradients."""
        for index in self._order:
            self.complete(self.groups[index])
        slots = [slot for index in self._active for slot in self.groups[index].slots]
        arrived = [slot.arrived for slot in slots]
        if self.reducing:
            arrived = self._anywhere(slots)
            self._learn_order()
        while self._in_flight:
            self._in_flight.popleft().wait()
        with torch.no_grad():
            for slot, there in zip(slots, arrived, strict=True):
                if there or slot.held:
                    slot.group.deliver(slot, reduced=self.reducing)
                else:
                    slot.arrived = False
        self.running = False

    def _anywhere(self, slots: list[Slot]) -> list[bool]:
        """Which parameters got a gradient on any rank: those that got none must not be stepped anywhere."""
        arrived = [slot.arrived for slot in slots]
        complete = all(slot.arrived or not slot.group.here for slot in slots)
        answers = self.rollcall.ask(Place.BACKWARD_END, int(complete))
        return [True] * len(arrived) if all(answers) else self.rollcall.any_rank(arrived)

    def _learn_order(self) -> None:
        """Take over the order in which rank 0 completed its groups; once for each set of training groups."""
        if not self._order_known:
            order = self.rollcall.exchange(self._completed)[0]
            assert isinstance(order, list)
            self._orders[tuple(self._active)] = order

    def abort(self) -> None:
        """An exception ended backward. Reductions that are under way are waited for when another one begins."""
        self._failed |= self.running
        self.running = False

    def forget(self) -> None:
        """The ranks have met anew; see `Mesh.recover`."""
        self.running = self._failed = self.aside = False
        self._in_flight.clear()

    def _settle(self) -> None:
        """Bring reductions to an end that a failed backward has left: peers have started them too, or none can go on.

        Raises:
            RankMismatchError: the ranks failed at different points.
        """
        self.rollcall.call(
            Place.BACKWARD_BEGIN,
            -1 - len(self._launched),
            what=f"after one that failed with {len(self._launched)} reductions started",
        )
        while self._in_flight:
            self._in_flight.popleft().wait()
        self._failed = False
