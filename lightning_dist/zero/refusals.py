"""What cannot be sharded, refused by name before anything is touched."""

import torch
from torch import nn

from lightning_dist.core.errors import UnsupportedModelError


def refuse_unsupported(module: nn.Module, device: torch.device) -> None:
    """Refuse, by name, what cannot be sharded.

    Raises:
        UnsupportedModelError: see its message.
    """
    for name, sub in module.named_modules():
        if getattr(sub, "sparse", False) and isinstance(sub, (nn.Embedding, nn.EmbeddingBag)):
            raise UnsupportedModelError(f"{name}: sparse gradients cannot be reduced in flat buffers; use sparse=False")
    for name, parameter in module.named_parameters():
        reason = _unsupported(parameter, device)
        if reason:
            raise UnsupportedModelError(f"parameter {name} {reason}")


def _unsupported(parameter: nn.Parameter, device: torch.device) -> str | None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        return "is not initialized yet: run one batch through lazy modules before training"
    if parameter.device.type == "meta":
        return "is on the meta device and has no values; build it on the CPU or let the strategy materialize it"
    if not parameter.dtype.is_floating_point:
        return (
            f"is of dtype {parameter.dtype}, which cannot be cut into fragments for an optimizer; make it a buffer, "
            'or use strategy="zero0"'
        )
    if parameter.device.type != "cpu" and parameter.device != device:
        return f"is on {parameter.device}, but this rank computes on {device}; move the whole module there"
    if parameter.layout is not torch.strided:
        return f"has layout {parameter.layout}; use a dense parameter"
    if parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"is of dtype {parameter.dtype}; quantized weights cannot be sharded"
    return None
