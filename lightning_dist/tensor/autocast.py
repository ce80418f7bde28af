"""What `torch.autocast` does to a function, for those that compute it in parts of their own.

Functions of ours that call torch inside are cast there like any other. Only what they keep for backward, and the dtype
of what they make of several calls, must be as autocast would have it for the one function in whose place they stand.
"""

import torch
from torch import Tensor


def casts(x: Tensor) -> bool:
    """Whether autocast is on and would cast `x`; float64 it leaves alone."""
    kind = x.device.type
    eligible = x.is_floating_point() and x.dtype is not torch.float64
    return eligible and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear or a product of matrices reads `x`."""
    return torch.get_autocast_dtype(x.device.type) if casts(x) else x.dtype


def for_product(x: Tensor) -> Tensor:
    """`x` as a linear or a product of matrices reads it."""
    return x.to(product_dtype(x)) if casts(x) else x


def loss_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of a loss."""
    return torch.float32 if casts(logits) else logits.dtype
