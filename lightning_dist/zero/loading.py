"""Whole values on their way into shards: what `load_state_dict` copies into a parameter goes to the masters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_dist.params.questions import own_class
from lightning_dist.zero import guard
from lightning_dist.zero.slot import Residency

if TYPE_CHECKING:
    from lightning_dist.zero.engine import ZeroEngine


class Loading:
    """Inside its block all parameters look released, so that every copy into them is intercepted (`guard`)."""

    def __init__(self, engine: "ZeroEngine") -> None:
        self.engine, self._open = engine, False

    @contextmanager
    def block(self) -> Iterator[None]:
        """See `ZeroEngine.loading`."""
        self.engine.notice_writes()
        for slot in self.engine.slots.values():
            slot.parameter.__class__ = guard.ReleasedParameter
        self._open = True
        try:
            yield
        finally:
            self._open = False
            for slot in self.engine.slots.values():
                if slot.group.residency is Residency.GATHERED:
                    slot.parameter.__class__ = own_class(slot.parameter)
            self.engine.refresh(self.engine.groups)

    def take(self, parameter: nn.Parameter, values: Tensor) -> bool:
        """This rank's part of the values, if a block is open; returns whether one is."""
        if self._open:
            slot = self.engine.slots[parameter]
            slot.group.load(slot, values)
        return self._open
