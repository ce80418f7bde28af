"""Gradients of several backward passes, kept aside and handed over at once.

A pipeline runs all forwards and backwards of a step before its caller zeroes what was there: until it asks for the
gradients, they must touch neither those of earlier steps nor any buffer of the engine. They are left where autograd
puts them and taken from there; `hand_over` then packs them, unit by unit, in the place of a backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_dist.zero.slot import Slot

if TYPE_CHECKING:
    from lightning_dist.zero.engine import ZeroEngine


class Aside:
    """What lies aside; nothing outside of a step."""

    def __init__(self, engine: "ZeroEngine") -> None:
        self.engine = engine
        self._kept: dict[Slot, Tensor] = {}

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Whatever backward passes inside the block give to parameters lies aside when it ends."""
        slots = [slot for slot in self.engine.slots.values() if slot.group.here]
        before = [slot.parameter.grad for slot in slots]
        for slot in slots:
            slot.parameter.grad = None
        self._kept.clear()
        self.engine.reducer.aside = True
        try:
            yield
            self._kept = {slot: slot.parameter.grad for slot in slots if slot.parameter.grad is not None}
        finally:
            self.engine.reducer.aside = False
            self.engine.forget_calls()  # so that units leave as soon as they are handed over
            for slot, gradient in zip(slots, before, strict=True):
                slot.parameter.grad = gradient

    def hand_over(self) -> None:
        """As if a backward had just computed them; to be run by `ZeroEngine.backward`."""
        kept, self._kept = self._kept, {}
        for slot in reversed(list(kept)):
            slot.parameter.grad = kept.pop(slot)
            self.engine.gradient_arrived(slot)

    def drop(self) -> None:
        """Nobody will ask for them."""
        self._kept.clear()
