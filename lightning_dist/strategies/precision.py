"""Precision under sharding: Lightning's own plugins, with the two things that must look beyond one rank.

What each flag means here (the master is what the optimizer updates and checkpoints hold)::

    flag         master   compute   gradients reduced in   moments
    32-true      fp32     fp32      fp32                   fp32
    bf16-mixed   fp32     bf16      fp32                   fp32
    16-mixed     fp32     fp16      fp32                   fp32      (loss scaling; all ranks share an overflow)
    bf16-true    bf16     bf16      bf16                   bf16      (fp32, fp32, fp32 with master_weights=True)
    64-true      fp64     fp64      fp64                   fp64

Clipping must use the norm of all shards, and an overflow on one rank must skip the step on all.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.comm import Mesh, Place
from lightning_dist.engine import clip_by_norm, clip_by_value
from lightning_dist.zero import Piece, ZeroEngine

MIXED_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def compute_dtype(plugin: Precision, *, master_weights: bool) -> torch.dtype | None:
    """Dtype of the gathered values where it is not that of the masters."""
    if isinstance(plugin, MixedPrecision):
        return MIXED_DTYPES[str(plugin.precision)]
    if isinstance(plugin, HalfPrecision) and master_weights:
        return plugin._desired_input_dtype
    return None


def convert(plugin: Precision, module: nn.Module, *, master_weights: bool) -> None:
    """Give parameters and buffers the dtype of the flag; with `master_weights` parameters stay as they are."""
    if isinstance(plugin, HalfPrecision) and master_weights:
        for sub in module.modules():
            for name, buffer in sub.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(sub, name, buffer.to(plugin._desired_input_dtype))
    else:
        plugin.convert_module(module)


def look_beyond_this_rank(plugin: Precision, engine: ZeroEngine) -> None:
    """Make clipping and loss scaling of a Lightning plugin (the user's own included) agree over all ranks."""
    plugin.clip_grad_by_norm = _NormClipper(engine)  # type: ignore[method-assign]
    plugin.clip_grad_by_value = _ValueClipper(engine)  # type: ignore[method-assign]
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and not isinstance(scaler._unscale_grads_, _SharedUnscale):
        scaler._unscale_grads_ = _SharedUnscale(scaler._unscale_grads_, engine.mesh)


class _NormClipper:
    def __init__(self, engine: ZeroEngine) -> None:
        self.engine = engine

    def __call__(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_by_norm(self.engine, pieces_of(self.engine, optimizer), float(clip_val))


class _ValueClipper(_NormClipper):
    def __call__(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_by_value(pieces_of(self.engine, optimizer), float(clip_val))


class _SharedUnscale:
    """`GradScaler._unscale_grads_`, with the overflow flag of any rank shown to all."""

    def __init__(self, unscale: Callable[..., dict[torch.device, Tensor]], mesh: Mesh) -> None:
        self.unscale, self.axis, self.rollcall, self.device = unscale, mesh.world, mesh.rollcall, mesh.device

    def __call__(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found = self.unscale(*args, **kwargs)
        if not found:  # a rank whose parameters are all frozen, or on other stages, has no gradient to look at
            found[self.device] = torch.zeros((), device=self.device)
        self.rollcall.call(Place.NORM, len(found), what="of gradients that may have overflowed")
        for flag in found.values():
            self.axis.all_reduce(flag.view(-1), purpose="overflow", op="max")
        return found


def pieces_of(engine: ZeroEngine, optimizer: Optimizer) -> list[Piece]:
    """The pieces that an optimizer updates."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [piece for piece in engine.pieces() if id(piece.slot.fragment) in held]
