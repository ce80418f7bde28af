"""The single-process truth that data-parallel training is compared with.

One process plays all ranks in turn. In each step, for each accumulated batch, each rank's part of it contributes

    loss(model, part) / (world * accumulated batches)

to the gradient, and then the optimizer steps once: the mean of means, as DDP computes it.

Buffers follow DDP: every forward of every rank starts from the buffers rank 0 has at that moment, and only what rank
0 does to them stays. Batch statistics are those of the rank's own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.zoo.case import Batch, Case

MODEL_SEED = 1
RELATIVE = 1e-10
FLOOR = 1e-2

Values = dict[str, Tensor]


@dataclass
class Reference:
    """What a run has to reproduce.

    Attributes:
        losses: Per step, the mean over ranks and accumulated batches.
        rank_losses: ``rank_losses[step][batch][rank]``, each rank's own loss, not divided.
        gradients: Per step and parameter name, just before the optimizer step; None where there is none.
        parameters: Final values by name; a tied parameter appears once, under its first name.
        buffers: Final values by name, as rank 0 has them; the non-persistent ones too.
    """

    losses: list[float] = field(default_factory=list)
    rank_losses: list[list[list[float]]] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: Values = field(default_factory=dict)
    buffers: Values = field(default_factory=dict)


def build(case: Case, seed: int = MODEL_SEED) -> nn.Module:
    """The case's model in training mode with the initial values that belong to the seed."""
    torch.manual_seed(seed)
    return case.make_model().train()


def global_batch(case: Case, step: int, index: int = 0, *, samples: int) -> Batch:
    """The batch that all ranks share in this step; ``index`` counts the batches accumulated within it."""
    return case.make_batch(samples, 1000 * (step + 1) + index)


def local_batch(batch: Batch, rank: int, world: int) -> Batch:
    """A rank's part: equal slices of dim 0, in the order of ranks."""

    def part(tensor: Tensor) -> Tensor:
        size, rest = divmod(len(tensor), world)
        if rest:
            raise ValueError(f"a batch of {len(tensor)} samples has no {world} equal parts")
        return tensor[rank * size : (rank + 1) * size]

    if isinstance(batch, dict):
        return {name: part(tensor) for name, tensor in batch.items()}
    return tuple(part(tensor) for tensor in batch)


def reference_steps(
    case: Case,
    batches_per_step: int,
    world: int,
    steps: int,
    optimizer_factory: Callable[[Iterable[nn.Parameter]], Optimizer],
    *,
    samples: int | None = None,
    seed: int = MODEL_SEED,
) -> Reference:
    """Train ``steps`` steps in this process as ``world`` data-parallel ranks would together.

    Args:
        case: The model, its data and its loss.
        batches_per_step: How many global batches are accumulated before an optimizer step.
        world: Number of ranks that share each global batch.
        steps: Number of optimizer steps.
        optimizer_factory: Gets ``model.parameters()``.
        samples: Size of a global batch; two per rank by default.
        seed: Of the initial values, as in `build`.
    """
    model = build(case, seed)
    optimizer = optimizer_factory(model.parameters())
    samples = 2 * world if samples is None else samples
    result = Reference()
    for step in range(steps):
        optimizer.zero_grad()
        batches = [global_batch(case, step, index, samples=samples) for index in range(batches_per_step)]
        losses = [_all_ranks(case, model, batch, world, batches_per_step) for batch in batches]
        result.rank_losses.append(losses)
        result.losses.append(sum(map(sum, losses)) / (world * batches_per_step))
        result.gradients.append(_copies_of_gradients(model))
        optimizer.step()
    result.parameters = _copies(model.named_parameters())
    result.buffers = _copies(model.named_buffers())
    return result


def _all_ranks(case: Case, model: nn.Module, batch: Batch, world: int, batches_per_step: int) -> list[float]:
    """One global batch: every rank's forward and backward, gradients added up; returns the ranks' losses."""
    before = _copies(model.named_buffers())
    after = before
    losses = []
    for rank in range(world):
        _set_buffers(model, before)
        loss = case.loss(model, local_batch(batch, rank, world))
        torch.autograd.backward(loss / (world * batches_per_step))
        losses.append(loss.item())
        if rank == 0:
            after = _copies(model.named_buffers())
    _set_buffers(model, after)
    return losses


def _copies(named: Iterable[tuple[str, Tensor]]) -> Values:
    return {name: tensor.detach().clone() for name, tensor in named}


def _copies_of_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


def _set_buffers(model: nn.Module, values: Values) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])


def assert_close(
    name: str,
    got: Tensor | float | None,
    want: Tensor | float | None,
    rel: float = RELATIVE,
    *,
    floor: float = FLOOR,
) -> None:
    """Compare one tensor with the truth: the largest error, relative to the largest element of ``want``.

    Args:
        name: What the message calls it.
        got: The value under test; None, as a missing gradient, equals None only.
        want: The true value.
        rel: Largest error allowed, as a fraction of the largest absolute element of ``want``.
        floor: A tensor smaller than this is measured as if its largest element were this, since what is zero but
            for rounding has no digits to compare.

    Raises:
        AssertionError: Naming the tensor, its shape and the largest error with its place.
    """
    if got is None or want is None:
        if got is not want:
            raise AssertionError(f"{name}: {_in_words(got)}, but it should be {_in_words(want)}")
        return
    got, want = torch.as_tensor(got).detach().cpu(), torch.as_tensor(want).detach().cpu()
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, but it should be {tuple(want.shape)}")
    if want.numel() == 0:
        return
    error = (got.double() - want.double()).abs()
    scale = max(want.double().abs().max().item(), floor)
    worst = torch.where(error.isnan(), torch.inf, error).argmax().item()
    largest = error.flatten()[int(worst)].item()
    if not largest <= rel * scale:  # also true for nan
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape)) if want.dim() else ()
        raise AssertionError(
            f"{name}: largest error {largest:.3e} at {place} of shape {tuple(want.shape)}, "
            f"{largest / scale:.3e} of the largest element {scale:.3e}, allowed is {rel:.1e}; "
            f"got {got[place].item()!r}, want {want[place].item()!r}"
        )


def assert_same_run(got: Reference, want: Reference) -> None:
    """Compare what ``got`` knows of a run with the truth; its empty fields are left out.

    ``got.rank_losses`` is not looked at: a rank knows only its own.
    """
    if got.losses:
        assert_close("losses", torch.tensor(got.losses), torch.tensor(want.losses))
    if got.gradients and len(got.gradients) != len(want.gradients):
        raise AssertionError(f"{len(got.gradients)} steps were made, not {len(want.gradients)}")
    for step, gradients in enumerate(got.gradients):
        _assert_same_names(f"gradients of step {step}", gradients, want.gradients[step])
        for name, gradient in gradients.items():
            assert_close(f"gradient of {name} in step {step}", gradient, want.gradients[step][name])
    for what, values, truth in (
        ("parameter", got.parameters, want.parameters),
        ("buffer", got.buffers, want.buffers),
    ):
        if values:
            _assert_same_names(f"final {what}s", values, truth)
        for name, value in values.items():
            assert_close(f"final {what} {name}", value, truth[name])


def _assert_same_names(what: str, got: Mapping[str, object], want: Mapping[str, object]) -> None:
    if got.keys() != want.keys():
        missing, added = sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())
        raise AssertionError(f"{what}: names differ; missing {missing}, unknown {added}")


def _in_words(value: Tensor | float | None) -> str:
    if value is None:
        return "None"
    return f"a tensor of shape {tuple(torch.as_tensor(value).shape)}"
