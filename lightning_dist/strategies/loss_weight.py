"""Means that equal those of one big batch, where batches count differently.

A loss is a mean over something, learned tokens mostly, of which batches hold different numbers. The mean of such means,
as data parallelism and accumulation take it, is not the mean over all. With weights w of rank r's batch i in one
optimizer step the gradient should be::

    sum over r, i of  w[r, i] g[r, i]  /  sum over r, i of  w[r, i]

How much all batches of the step will weigh is known only at its end. So each gradient is taken times w over the weight
of the step's first batches, and what the ranks have averaged is divided by the rest when the last one is in.
"""

import torch

from lightning_dist.comm import Mesh, Place
from lightning_dist.core.errors import ConfigurationError
from lightning_dist.zero import ZeroEngine


class WeighedStep:
    """The weights of the batches of an optimizer step, over the replicas."""

    def __init__(self) -> None:
        self._totals: list[float] = []

    def factor(self, weight: float, mesh: Mesh) -> float:
        """What this rank's loss of a batch is multiplied by. All ranks call it.

        Raises:
            ConfigurationError: a weight that is negative or not a number; on all ranks, the batches of a step weigh
                nothing.
        """
        bits = int(torch.tensor(weight, dtype=torch.float64).view(torch.int64).item())
        said = mesh.rollcall.ask(Place.LOSS, bits, what="weighing it")
        weights = [float(torch.tensor(said[rank]).view(torch.float64)) for rank in mesh.dp.ranks]
        if any(not one >= 0 for one in weights):
            raise ConfigurationError(f"loss_weight returned {weights} on the replicas: it must be 0 or more")
        total = sum(weights)
        if total == 0:
            raise ConfigurationError(
                "loss_weight returned 0 for the batch of every replica: nothing is learned from it. Leave such batches "
                "out of the dataset"
            )
        self._totals.append(total)
        return mesh.dp.size * weight / self._totals[0]

    def close(self, engine: ZeroEngine) -> None:
        """The last batch is in: bring the gradients to the mean over all."""
        if len(self._totals) > 1:
            factor = self._totals[0] / sum(self._totals)
            for piece in engine.pieces():
                if piece.slot.gradient is not None:
                    piece.slot.gradient.mul_(factor)
        self._totals.clear()
