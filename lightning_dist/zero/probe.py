"""Is an optimizer elementwise? Decided by trying it, not by a list of names.

The engine updates flat pieces of parameters, each on another rank. That is the same optimizer only if every
element's update depends on that element's own gradient and state. So the user's optimizer, with its settings, is
run twice on a small stand-in of its parameters: once whole, once in pieces that know nothing of each other (one of
them empty, as a rank's share can be). Optimizers that look at whole matrices or at norms (LAMB, LARS, Adafactor, Muon)
then differ, and those that need more than gradients (LBFGS) fail.

In a pipeline whose optimizer state is not sharded, parameters are whole where they are, and empty on the other stages.
There an optimizer may look at a whole parameter, but not at several at once (a norm over all of them), and it must bear
the empty ones. So it is run on stand-ins of all its groups at once, and then as each of two stages would.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.core.errors import UnsupportedOptimizerError

NUM_STEPS = 2
CUTS = (0, 7, 7, 24)  # pieces of the stand-in's 24 elements; the second one is empty
_HOOKS = {"step", "state", "zero_grad", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}


@dataclass(frozen=True)
class Probed:
    """What the trial showed: state tensors kept per element of a parameter, in bytes per element."""

    state_bytes_per_element: float


def probe(optimizer: Optimizer) -> Probed:
    """Try `optimizer`'s class and settings on stand-ins; it is itself left alone.

    Raises:
        UnsupportedOptimizerError: its update is not elementwise, or it cannot be tried.
    """
    kind = type(optimizer).__name__
    per_element = 0.0
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            for index in range(len(optimizer.param_groups)):
                if optimizer.param_groups[index]["params"]:
                    per_element = max(per_element, _probe_group(optimizer, index))
    except UnsupportedOptimizerError:
        raise
    except Exception as error:
        raise UnsupportedOptimizerError(
            f"{kind} cannot run on pieces of parameters, which sharding needs "
            f"({type(error).__name__}: {error}). {_REMEDY}"
        ) from error
    return Probed(per_element)


def probe_stages(optimizer: Optimizer) -> None:
    """Insist that `optimizer` does the same on stages, each of which holds some of its parameters whole.

    Raises:
        UnsupportedOptimizerError: it couples parameters with each other, or does not run beside empty ones.
    """
    kind = type(optimizer).__name__
    groups = [k for k, group in enumerate(optimizer.param_groups) if group["params"]]
    places = [(group, stage) for stage in range(NUM_STAGES) for group in groups]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            before = [_parameter_for(optimizer, group, stage).detach() for group, stage in places]
            together = _run_stages(optimizer, places, here=range(NUM_STAGES))
    except Exception as error:
        raise UnsupportedOptimizerError(
            f"{kind} cannot be tried on parameters like those that it holds ({type(error).__name__}: {error}), which a "
            f"pipeline insists on. {_PIPELINE_REMEDY}"
        ) from error
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            apart = {stage: _run_stages(optimizer, places, here=[stage]) for stage in range(NUM_STAGES)}
    except Exception as error:
        raise UnsupportedOptimizerError(
            f"{kind} does not run where parameters are away: a pipeline shows it those of other stages as empty "
            f"({type(error).__name__}: {error}). {_PIPELINE_REMEDY}"
        ) from error
    for number, (_, stage) in enumerate(places):
        moved = float((together[number] - before[number]).abs().max())
        wrong = float((apart[stage][number] - together[number]).abs().max())
        if not wrong <= 1e-3 * moved + 1e-12:
            raise UnsupportedOptimizerError(
                f"{kind} couples parameters with each other (a norm over all of them?), and in a pipeline no rank "
                f"holds all of them: where some are away it gives the others other values (they differ by {wrong:.3g} "
                f"where the update is {moved:.3g}). {_PIPELINE_REMEDY}"
            )


NUM_STAGES = 2
_PIPELINE_REMEDY = (
    "Use an optimizer that updates each parameter by itself (AdamW, SGD, Lion, ...; clip by norm with the Trainer's "
    'gradient_clip_val), or strategy="zero0", which keeps all parameters on every rank.'
)
_REMEDY = (
    'Use an elementwise optimizer (AdamW, Adam, SGD, Adagrad, RMSprop, Lion, ...), or strategy="zero0", '
    "which keeps every parameter whole on every rank."
)


def _sample(optimizer: Optimizer, index: int) -> Tensor:
    sample: Tensor = max(optimizer.param_groups[index]["params"], key=lambda p: (p.numel() > 0, p.ndim))
    return sample


def _stand_in(sample: Tensor) -> tuple[tuple[int, ...], Tensor, list[Tensor]]:
    """A shape like that of a parameter, values for it, and the gradients of the steps; flat."""
    shape = (6, 4) + (1,) * (sample.ndim - 2) if sample.ndim >= 2 else (24,)
    values = torch.linspace(-1.0, 1.5, 24, dtype=sample.dtype, device=sample.device)
    gradients = [
        torch.linspace(2.0, -1.0, 24, dtype=values.dtype, device=values.device).roll(5 * k) for k in range(NUM_STEPS)
    ]
    return shape, values, gradients


def _parameter_for(optimizer: Optimizer, index: int, stage: int) -> nn.Parameter:
    """Whole, for one stage: not the same values on each."""
    shape, values, _ = _stand_in(_sample(optimizer, index))
    return nn.Parameter((values * (1 + stage)).view(shape))


def _run_stages(optimizer: Optimizer, places: Sequence[tuple[int, int]], here: Sequence[int]) -> list[Tensor]:
    """What the parameters of these (group, stage) become where only those of the stages `here` are not empty."""
    parameters, gradients = [], []
    for index, stage in places:
        parameter = _parameter_for(optimizer, index, stage)
        given = [g.view(parameter.shape) / (3 * stage + index + 1) for g in _stand_in(parameter)[2]]
        if stage not in here:
            parameter, given = nn.Parameter(parameter.detach().new_empty(0)), [g.new_empty(0) for g in given]
        parameters.append(parameter)
        gradients.append(given)
    _run(optimizer, [index for index, _ in places], parameters, gradients)
    return [parameter.detach() for parameter in parameters]


def _probe_group(optimizer: Optimizer, index: int) -> float:
    shape, values, gradients = _stand_in(_sample(optimizer, index))
    whole = nn.Parameter(values.clone().view(shape))
    used = _run(optimizer, [index], [whole], [[g.view(shape) for g in gradients]])
    pieces = []
    for start, stop in pairwise(CUTS):
        piece = nn.Parameter(values[start:stop].clone())
        _run(optimizer, [index], [piece], [[g[start:stop] for g in gradients]])
        pieces.append(piece.detach())
    moved = (whole.detach().reshape(-1) - values).abs().max()
    error = (torch.cat(pieces) - whole.detach().reshape(-1)).abs().max()
    if not bool(error <= 1e-3 * moved + 1e-12):
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} is not elementwise: updating a parameter in flat pieces gives other values "
            f"(they differ by {float(error):.3g} where the update is {float(moved):.3g}). {_REMEDY}"
        )
    tensors = [v for v in used.values() if isinstance(v, Tensor) and v.shape == whole.shape]
    return float(sum(v.element_size() for v in tensors))


def _run(
    optimizer: Optimizer, indices: Sequence[int], parameters: Sequence[nn.Parameter], gradients: Sequence[list[Tensor]]
) -> dict[str, Any]:
    """Step a copy of the optimizer that knows only `parameters`, of the groups `indices`; the state of the first."""
    memo: dict[int, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        known = parameters[indices.index(number)] if number in indices else parameters[0]
        memo.update((id(parameter), known) for parameter in group["params"])
    clone: Any = object.__new__(type(optimizer))
    clone.__dict__.update(copy.deepcopy({k: v for k, v in optimizer.__dict__.items() if k not in _HOOKS}, memo))
    clone._optimizer_step_pre_hooks, clone._optimizer_step_post_hooks = {}, {}
    groups = {number: clone.param_groups[number] for number in dict.fromkeys(indices)}
    clone.param_groups = list(groups.values())
    clone.state = defaultdict(dict)
    for group in clone.param_groups:
        group["params"] = []
    for number, parameter in zip(indices, parameters, strict=True):
        groups[number]["params"].append(parameter)
        sample = _sample(optimizer, number)
        born_with = optimizer.state.get(sample)
        if born_with:
            clone.state[parameter] = {key: _like(value, sample, parameter) for key, value in born_with.items()}
    for step in zip(*gradients, strict=True):
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(clone)
    state: dict[str, Any] = clone.state[parameters[0]]
    return state


def _like(value: Any, sample: Tensor, parameter: nn.Parameter) -> Any:
    """State that was made in the constructor, shaped for the stand-in."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape != sample.shape:
        return value.clone()
    if value.numel() == 0:  # of a fragment of which this rank holds nothing
        return torch.zeros_like(parameter, dtype=value.dtype)
    return torch.full_like(parameter, float(value.reshape(-1)[0]), dtype=value.dtype)
