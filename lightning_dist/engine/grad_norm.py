"""Gradient norms of sharded gradients: each logical parameter counts once, and all ranks get the same number.

For a p-norm every rank sums ``|g|^p`` over the runs that only it holds; the ranks' sums are exchanged and added in rank
order, so the result is the same to the bit everywhere::

    ||g||_p = ( sum over ranks sum over pieces |g|^p / copies )^(1/p)        ||g||_inf = max over ranks

The sums are made in float64: a norm is one number, and it should not depend on the layout.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dist.comm.rollcall import Place
from lightning_dist.zero import Piece, ZeroEngine


def grad_norm(engine: ZeroEngine, pieces: Sequence[Piece] | None = None, norm_type: float = 2.0) -> Tensor:
    """Norm of all gradients of `pieces` (default: of the whole module) as one vector; collective.

    Returns:
        a float64 scalar on the engine's device, equal on all ranks.
    """
    local = _powers(engine.pieces() if pieces is None else pieces, norm_type, engine.mesh.device)
    total = _over_ranks(engine, local.sum().view(1) if norm_type != math.inf else local.amax().view(1), norm_type)[0]
    return total if norm_type == math.inf else total ** (1.0 / norm_type)


def grad_norms(engine: ZeroEngine, norm_type: float = 2.0) -> dict[str, Tensor]:
    """Norm of every parameter's gradient by name (0 where there is none); collective."""
    pieces = engine.pieces()
    totals = _over_ranks(engine, _powers(pieces, norm_type, engine.mesh.device), norm_type)
    norms = totals if norm_type == math.inf else totals ** (1.0 / norm_type)
    return dict(zip((piece.spec.name for piece in pieces), norms.unbind(), strict=True))


def clip_by_norm(engine: ZeroEngine, pieces: Sequence[Piece], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of `pieces` so that their common norm is at most `max_norm`; returns the norm before.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: ``min(1, max_norm / (norm + 1e-6))``.
    """
    norm = grad_norm(engine, pieces, norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in _gradients(pieces):
        gradient.mul_(factor.to(gradient.dtype))
    return norm


def clip_by_value(pieces: Sequence[Piece], limit: float) -> None:
    """Clamp every gradient element to [-limit, limit]; local."""
    for gradient in _gradients(pieces):
        gradient.clamp_(-limit, limit)


def _gradients(pieces: Sequence[Piece]) -> list[Tensor]:
    return [piece.slot.gradient for piece in pieces if piece.slot.gradient is not None]


def _powers(pieces: Sequence[Piece], norm_type: float, device: torch.device) -> Tensor:
    """``sum |g|^p / copies`` (or ``max |g|``) of each piece, float64."""
    values = [torch.zeros((), dtype=torch.float64, device=device)] * (len(pieces) or 1)
    for index, piece in enumerate(pieces):
        gradient = piece.slot.gradient
        if gradient is None or not gradient.numel():
            continue
        if norm_type == math.inf:
            values[index] = gradient.detach().abs().amax().double()
        else:
            norm = torch.linalg.vector_norm(gradient.detach(), norm_type, dtype=torch.float64)
            values[index] = norm**norm_type / piece.spec.copies
    return torch.stack(values)


def _over_ranks(engine: ZeroEngine, local: Tensor, norm_type: float) -> Tensor:
    """Add (or take the maximum of) every rank's values, in rank order."""
    axis = engine.mesh.world
    engine.mesh.rollcall.call(Place.NORM, local.numel())
    everyone = local.new_zeros(axis.size, local.numel())
    everyone[axis.rank] = local
    axis.all_gather(everyone.view(-1), purpose="norm").wait()
    return everyone.amax(0) if norm_type == math.inf else everyone.sum(0)
