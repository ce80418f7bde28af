"""Signals that end a run: whichever rank hears one, all ranks act on it together, between two batches.

A signal reaches a rank anywhere, in the middle of a step too, and perhaps that rank alone. Lightning's handlers
communicate at once: for SIGTERM they broadcast from rank 0, for SLURM's warning they save a checkpoint. While the other
ranks are in a collective of their own this hangs. So here a handler only notes what it heard, and the ranks ask each
other for notes where all of them pass::

    before a training batch, before an evaluation step, at the end of training
"""

from signal import SIGTERM, SIGUSR1
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dist.comm import Place, RollCall

TERMINATE, REQUEUE = 1, 2


class SharedSignals:
    """See the module docstring. What was noted too late for one run counts in the next one."""

    def __init__(self, trainer: "pl.Trainer", rollcall: RollCall) -> None:
        self.trainer, self.rollcall = trainer, rollcall
        self._heard: set[int] = set()
        self._asked_by_loop = False

    def install(self, trainer: "pl.Trainer") -> None:
        """Take the place of Lightning's handlers, before it registers them, and of its broadcast ahead of a batch."""
        self.trainer = trainer
        connector: Any = trainer._signal_connector
        connector._sigterm_notifier_fn = self._noting(TERMINATE)
        connector._slurm_sigusr_handler_fn = self._noting(REQUEUE)
        loop: Any = trainer.fit_loop.epoch_loop
        self._asked_by_loop = hasattr(loop, "_broadcast_sigterm_tensor")  # older versions of Lightning have none
        if self._asked_by_loop:
            loop._broadcast_sigterm_tensor = self.act

    def _noting(self, what: int) -> Any:
        def handler(signum: int, frame: FrameType | None) -> None:
            self._heard.add(what)

        return handler

    def before_training_batch(self) -> None:
        """For versions of Lightning whose loop does not ask by itself."""
        if not self._asked_by_loop:
            self.act()

    def act(self) -> None:
        """Do what any rank was told to; all ranks call it.

        Raises:
            SIGTERMException: one of them was told to terminate.
        """
        said = self.rollcall.ask(Place.BATCH, sum(set(self._heard)))
        connector: Any = self.trainer._signal_connector
        if any(heard & REQUEUE for heard in said):
            self._heard.discard(REQUEUE)
            type(connector)._slurm_sigusr_handler_fn(connector, SIGUSR1, None)
        ranks = [rank for rank, heard in enumerate(said) if heard & TERMINATE]
        if ranks:
            self._heard.discard(TERMINATE)
            connector.received_sigterm = True
            rank_zero_info(f"Received SIGTERM on ranks {ranks}: the run ends on all of them")
            raise SIGTERMException(f"signal {int(SIGTERM)} (SIGTERM) was sent to ranks {ranks}")
