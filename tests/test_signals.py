"""Real signals to one rank or to all, wherever they reach it: every rank ends after the same batch."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.harness import rank, ranks
from tests.lit import trainer_on_ranks
from tests.pp.lit import Small, everywhere, points
from tests.test_failed_runs import STRATEGIES


class Told(Small):
    """Sends a signal to its own process at batch 1 of a loop, after the last training backward or at the very end."""

    def __init__(self, where: str, to: tuple[int, ...]) -> None:
        super().__init__()
        self.where, self.to = where, to

    def tell(self, where: str) -> None:
        if where == self.where and rank() in self.to and not self.trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 1:
            self.tell("training")

    def on_validation_batch_start(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        if index == 1:
            self.tell("validation")

    def on_test_batch_start(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        if index == 1:
            self.tell("test")

    def on_after_backward(self) -> None:
        if self.trainer.is_last_batch:
            self.tell("last batch")

    def on_train_epoch_end(self) -> None:
        self.tell("end")


WHERE = {"training": (2, 0), "validation": (3, 1), "last batch": (3, 0), "end": (3, 3), "test": (0, 0)}
"""Optimizer steps and validation batches that are done when the run ends."""


@pytest.mark.parametrize("name", ["zero1", "tp", "pp"])
@ranks(2)
def test_a_signal_to_any_rank_ends_all(name: str) -> None:
    places = [("training", (0,)), ("training", (1,)), ("training", (0, 1)), *((where, (1,)) for where in WHERE)]
    before = signal.getsignal(signal.SIGTERM)
    for where, to in places:
        module, ours = Told(where, to), trainer_on_ranks(STRATEGIES[name](), max_epochs=1)
        batches: list[int] = []
        module.on_validation_batch_end = lambda *_, batches=batches: batches.append(1)  # type: ignore[assignment]
        run = ours.test if where == "test" else ours.fit
        with pytest.raises(SIGTERMException, match="SIGTERM"):
            run(module, points(), *([] if where == "test" else [points()]))
        assert ours.received_sigterm
        assert everywhere(ours, (ours.global_step, len(batches))) == [WHERE[where]] * 2, (where, to)
        assert signal.getsignal(signal.SIGTERM) is before  # the Trainer was torn down
