"""`torch.compile` cannot trace tensors of which ranks hold parts: what it would trace is refused by name."""

from collections.abc import Iterable

import torch
from torch import nn

from lightning_dist.core.errors import UnsupportedModelError

REMEDY = (
    "torch.compile cannot trace tensors of which each rank holds a part. Leave torch.compile and .compile() out, or "
    "compile only modules and functions that neither hold cut weights nor see what these compute"
)


WRAPPER = "_orig_mod."
"""What torch.compile(module) puts into the names of what it wraps."""


def refuse_compiled(module: nn.Module, cut: Iterable[str]) -> None:
    """Refuse compiled modules around what is to be cut, given by full names.

    Raises:
        UnsupportedModelError: there is one.
    """
    for name, sub in module.named_modules():
        if "_orig_mod" in sub._modules or getattr(sub, "_compiled_call_impl", None) is not None:
            inside = next((held for held in cut if f"{held}.".startswith(f"{name}." if name else "")), None)
            if inside is not None:
                raise UnsupportedModelError(
                    f"{name or type(module).__name__} is compiled and holds {inside}, which is to be cut. {REMEDY}"
                )


def refuse_tracing() -> None:
    """Inside torch.compile's tracing, say so; it shows the words below its own."""
    if torch.compiler.is_compiling():
        raise UnsupportedModelError(REMEDY)
