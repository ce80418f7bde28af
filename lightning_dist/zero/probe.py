"""Is an optimizer elementwise? Decided by trying it, not by a list of names.

The engine updates flat pieces of parameters, each on another rank. That is the same optimizer only if every
element's update depends on that element's own gradient and state. So the user's optimizer, with its settings, is
run twice on a small stand-in of its parameters: once whole, once in pieces that know nothing of each other (one of
them empty, as a rank's share can be). Optimizers that look at whole matrices or at norms (LAMB, LARS, Adafactor, Muon)
then differ, and those that need more than gradients (LBFGS) fail.
"""

import copy
from collections import defaultdict
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


_REMEDY = (
    'Use an elementwise optimizer (AdamW, Adam, SGD, Adagrad, RMSprop, Lion, ...), or strategy="zero0", '
    "which keeps every parameter whole on every rank."
)


def _probe_group(optimizer: Optimizer, index: int) -> float:
    sample = max(optimizer.param_groups[index]["params"], key=lambda p: (p.numel() > 0, p.ndim))
    shape = (6, 4) + (1,) * (sample.ndim - 2) if sample.ndim >= 2 else (24,)
    values = torch.linspace(-1.0, 1.5, 24, dtype=sample.dtype, device=sample.device)
    gradients = [
        torch.linspace(2.0, -1.0, 24, dtype=values.dtype, device=values.device).roll(5 * k) for k in range(NUM_STEPS)
    ]
    whole = nn.Parameter(values.clone().view(shape))
    used = _run(optimizer, index, sample, whole, [g.view(shape) for g in gradients])
    pieces = []
    for start, stop in pairwise(CUTS):
        piece = nn.Parameter(values[start:stop].clone())
        _run(optimizer, index, sample, piece, [g[start:stop].clone() for g in gradients])
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
    optimizer: Optimizer, index: int, sample: Tensor, parameter: nn.Parameter, gradients: list[Tensor]
) -> dict[str, Any]:
    """Step a copy of the optimizer that knows only `parameter`; returns the state it keeps for it."""
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for known in group["params"]:
            memo[id(known)] = parameter
    clone: Any = object.__new__(type(optimizer))
    clone.__dict__.update(copy.deepcopy({k: v for k, v in optimizer.__dict__.items() if k not in _HOOKS}, memo))
    clone._optimizer_step_pre_hooks, clone._optimizer_step_post_hooks = {}, {}
    clone.param_groups = [clone.param_groups[index]]
    clone.param_groups[0]["params"] = [parameter]
    clone.state = defaultdict(dict)
    born_with = optimizer.state.get(sample)
    if born_with:
        clone.state[parameter] = {key: _like(value, sample, parameter) for key, value in born_with.items()}
    for gradient in gradients:
        parameter.grad = gradient.clone()
        type(optimizer).step(clone)
    state: dict[str, Any] = clone.state[parameter]
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
