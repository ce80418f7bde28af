"""A loss that is NaN or infinite on some rank: stop the run, skip the optimizer step on all ranks, or do not look."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.comm import Mesh, Place
from lightning_dist.core.errors import NonFiniteLossError

OnNonFinite = Literal["error", "skip", "ignore"]


@dataclass
class LossWatch:
    """Looks at every loss before its backward, and remembers that a step must be skipped."""

    on_nonfinite: OnNonFinite
    skipping: bool = field(default=False, init=False)
    _skipped: bool = field(default=False, init=False)

    def begin_step(self) -> None:
        """A training step begins. Bad gradients may be accumulated: they count until an optimizer step skipped them."""
        if self._skipped:
            self.skipping = self._skipped = False

    def look(self, loss: Tensor, trainer: "pl.Trainer", mesh: Mesh) -> None:
        """Look at a loss; all ranks do.

        Raises:
            NonFiniteLossError: on the rank whose loss is not finite, under "error".
        """
        if self.on_nonfinite == "ignore":
            return
        bad = not bool(torch.isfinite(loss.detach()).all())
        where = f"at batch {trainer.fit_loop.batch_idx} of epoch {trainer.current_epoch}"
        if self.on_nonfinite == "skip":
            flags = mesh.rollcall.ask(Place.LOSS, int(bad))
            if any(flags):
                self.skipping = True
                ranks = ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)
                rank_zero_info(f"loss is not finite on rank {ranks} {where}; all ranks skip this optimizer step")
        elif bad:
            raise NonFiniteLossError(
                f"the loss is {float(loss.detach().flatten()[0])} on rank {mesh.rank} {where}. Look at that batch, or "
                f'pass {type(trainer.strategy).__name__}(on_nonfinite="skip") to skip such steps on all ranks, '
                '"ignore" to go on'
            )

    def guard(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """An optimizer's closure that leaves no gradients where its step is to be skipped."""

        def guarded() -> Any:
            result = closure()
            if self.skipping:
                self._skipped = True
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            return result

        return guarded
