"""The backward in two halves: input gradients now, weight gradients later.

The input gradient of ``y = x W^T`` is ``g W`` and the stage before waits for it; the weight gradient ``g^T x`` nobody
waits for (Qi et al. 2024, arXiv 2401.10241). While a stage's forward runs within `Deferred`, linear maps whose weight
is a parameter go through a function of our own, whose backward gives the first and notes down the second. `finish`
computes what was noted, adding it right into ``weight.grad``.

What runs inside a checkpoint of the user's own is left as it is: it is computed once more in backward, outside of this
mode, and must save the same tensors there.

Everything else (norms, biases, embeddings, weights that user code reads in other ways) gets its gradient in the first
half, as usual: the numbers are the same, and what is deferred is nearly all of the work.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@dataclass
class Deferred(TorchFunctionMode):
    """The weight gradients of one forward."""

    noted: list[tuple[nn.Parameter, Tensor, Tensor, bool]] = field(default_factory=list)
    _savers: object = None  # who saves tensors for autograd, where nobody else may: nobody, or a checkpoint of ours

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Take linear maps over."""
        kwargs = kwargs or {}
        if func in _TAKEN and _savers() is not self._savers:
            return func(*args, **kwargs)
        if func is F.linear:
            x, weight, bias = _linear_arguments(*args, **kwargs)
            if _can_wait(x, weight):
                return _linear(x, weight, bias, self.noted, False)
        elif func is torch.addmm and len(args) == 3 and not kwargs and _can_wait(args[1], args[2]):  # Conv1D
            return _linear(args[1], args[2], args[0], self.noted, True)
        return func(*args, **kwargs)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The inside of a checkpoint of ours, whose second forward is within `again`."""
        before, self._savers = self._savers, _savers()
        try:
            yield
        finally:
            self._savers = before

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same, when it is computed in backward."""
        with self, self.computing():
            yield

    @torch.no_grad()
    def finish(self) -> None:
        """Compute the weight gradients and add them to ``weight.grad``."""
        for weight, gradient, x, transposed in self.noted:
            left, right = (x, gradient) if transposed else (gradient, x)
            if weight.grad is None:
                weight.grad = (left.t() @ right).to(weight.dtype)
            elif weight.grad.dtype == left.dtype:
                weight.grad.addmm_(left.t(), right)
            else:
                weight.grad.add_(left.t() @ right)
        self.noted.clear()


_TAKEN = (F.linear, torch.addmm)


def _savers() -> object:
    """The function that packs what autograd saves, if there is one: a checkpoint's, for instance."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def _linear_arguments(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return x, weight, bias  # by position or by name, as people call it


def _can_wait(x: object, weight: object) -> bool:
    """Whether the weight is an ordinary parameter that is trained, and nobody watches its gradient."""
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and torch.is_grad_enabled()
        and not weight._backward_hooks
        and isinstance(x, Tensor)
        and x.requires_grad
        and type(x) in (Tensor, nn.Parameter)
        and x.ndim >= 1
    )


class _Linear(torch.autograd.Function):
    """``x W^T + b``, or with `transposed` ``x W + b``; x (..., in), W (out, in)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, noted: list[Any], transposed: bool
    ) -> Tensor:
        ctx.noted, ctx.parameter, ctx.transposed, ctx.biased = noted, weight, transposed, bias is not None
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            ctx.given = x.dtype
            x, used = x.to(dtype), weight.to(dtype)
        else:
            ctx.given, used = x.dtype, weight
        ctx.save_for_backward(x, used)
        if not transposed:
            return F.linear(x, used, None if bias is None else bias.to(x.dtype))
        y = x.reshape(-1, x.shape[-1]) @ used
        y = y if bias is None else y + bias.to(y.dtype)
        return y.view(*x.shape[:-1], used.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        ctx.noted.append((ctx.parameter, flat, x.reshape(-1, x.shape[-1]), ctx.transposed))
        grad_x = gradient @ (weight.t() if ctx.transposed else weight)
        return grad_x.to(ctx.given), None, flat.sum(0) if ctx.biased else None, None, None


_linear: Callable[..., Tensor] = _Linear.apply
