"""What one model of the zoo is: how to build it, how to feed it, how to score it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch: TypeAlias = dict[str, Tensor] | tuple[Tensor, ...]

DTYPE = torch.float64


@dataclass(frozen=True)
class Case:
    """A tiny model with its data and its loss.

    Attributes:
        name: Its key in the zoo.
        make_model: Builds the model in float64; initial values come from torch's global generator, which the
            caller seeds.
        make_batch: ``(size, seed) -> batch``; dim 0 of every tensor counts the samples.
        loss: ``(model, batch) -> scalar``, a mean over the samples of the batch.
        equals_big_batch: The mean of the losses of equal parts of a batch is the loss of the whole batch. False
            where a sample's output depends on which others are in its part.
        same_path_on_all_ranks: False where the data decides which submodules run.
        reads_parameters_outside_forward: The loss itself reads parameters, after the forward has ended.
        changes_buffers: A forward in training mode writes into buffers.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    equals_big_batch: bool = True
    same_path_on_all_ranks: bool = True
    reads_parameters_outside_forward: bool = False
    changes_buffers: bool = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Travel to other processes by name, since the functions of a case need not be picklable."""
        from tests.zoo import ZOO, case_named

        if ZOO.get(self.name) is self:
            return case_named, (self.name,)
        return super().__reduce_ex__(protocol)


def generator(seed: int) -> torch.Generator:
    """Random numbers for a batch, independent of the global ones that initial weights are drawn from."""
    return torch.Generator(device="cpu").manual_seed(seed)


def tokens(vocabulary: int, length: int) -> Callable[[int, int], Batch]:
    """Batches of random token ids with a random target for every position."""

    def make(size: int, seed: int) -> Batch:
        draw = generator(seed)
        shape = (size, length)
        return {
            "input_ids": torch.randint(vocabulary, shape, generator=draw, device="cpu"),
            "labels": torch.randint(vocabulary, shape, generator=draw, device="cpu"),
        }

    return make


def vectors(features: int, classes: int) -> Callable[[int, int], Batch]:
    """Batches of random vectors, each with the number of a class."""

    def make(size: int, seed: int) -> Batch:
        draw = generator(seed)
        x = torch.randn(size, features, generator=draw, dtype=DTYPE, device="cpu")
        return x, torch.randint(classes, (size,), generator=draw, device="cpu")

    return make


def images(side: int, classes: int) -> Callable[[int, int], Batch]:
    """Batches of random pictures of three channels, each with the number of a class."""

    def make(size: int, seed: int) -> Batch:
        draw = generator(seed)
        x = torch.randn(size, 3, side, side, generator=draw, dtype=DTYPE, device="cpu")
        return x, torch.randint(classes, (size,), generator=draw, device="cpu")

    return make


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over all positions of all samples: logits (b, s, v), labels (b, s)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of a model that maps the first tensor of a pair to logits."""
    x, labels = batch
    assert isinstance(x, Tensor)
    assert isinstance(labels, Tensor)
    return F.cross_entropy(model(x), labels)


def predict_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of a model that maps token ids to logits for every position."""
    assert isinstance(batch, dict)
    return token_loss(model(batch["input_ids"]), batch["labels"])
