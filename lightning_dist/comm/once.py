"""`once_differentiable`: as torch's decorator of that name, with an error that says what is missing and what to do.

A collective in backward leaves no trace for a second one: a gradient of a gradient would be silently wrong.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lightning_dist.core.errors import UnsupportedModelError

TWICE = (
    "a gradient of a gradient (a gradient penalty, create_graph=True) would pass through a tensor that ranks hold in "
    'parts, which is differentiable once. Keep the modules of the penalty whole by the style "replicate" in a tp_plan, '
    'or train them with strategy="zero2", whose parameters are plain tensors'
)


class _Refused(torch.autograd.Function):
    """Gradients as they are, whose own gradients are refused."""

    @staticmethod
    def forward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedModelError(TWICE)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd function that cannot be differentiated itself."""

    @wraps(backward)
    def once(ctx: Any, *gradients: Tensor) -> Any:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        several = found if isinstance(found, tuple) else (found,)
        traced = [None if x is None else x.detach().requires_grad_() for x in several]
        refused = _Refused.apply(*traced)  # type: ignore[no-untyped-call]
        return refused if isinstance(found, tuple) else refused[0]

    return once
