"""Autograd called by hand, with tensors of which each rank holds a part."""

import inspect
from typing import Any

import torch
from torch import Tensor

from lightning_dist.comm.parts import part_of
from lightning_dist.params.questions import without_answers
from lightning_dist.tensor.rules.operands import Args, Kwargs
from lightning_dist.tensor.split_tensor import SplitTensor, split_tensor, whole, whole_shape


def backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`torch.autograd.backward`, which reentrant recompute calls with gradients of parts."""
    bound = inspect.signature(torch.autograd.backward).bind(*args, **kwargs)
    given = bound.arguments
    given["tensors"], gradients = _with_gradients(given["tensors"], given.get("grad_tensors"))
    if gradients is not None:
        given["grad_tensors"] = gradients
    with torch._C.DisableTorchFunctionSubclass():
        return func(*bound.args, **bound.kwargs)


def differentiate(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`torch.autograd.grad`: gradients lie as the inputs do."""
    bound = inspect.signature(torch.autograd.grad).bind(*args, **kwargs)
    given = bound.arguments
    inputs = (given["inputs"],) if isinstance(given["inputs"], Tensor) else tuple(given["inputs"])
    given["outputs"], gradients = _with_gradients(given["outputs"], given.get("grad_outputs"))
    if gradients is not None:
        given["grad_outputs"] = gradients
    given["inputs"] = inputs
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*bound.args, **bound.kwargs)
    return tuple(
        split_tensor(gradient, x.lie) if isinstance(x, SplitTensor) and gradient is not None else gradient
        for x, gradient in zip(inputs, found, strict=True)
    )


def _with_gradients(tensors: Any, gradients: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...] | None]:
    """The tensors, which are parts where none asks, and the parts of their gradients, which may be whole."""
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    if gradients is None:
        return tensors, None
    gradients = (gradients,) if isinstance(gradients, Tensor) else tuple(gradients)
    own = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if isinstance(gradient, SplitTensor):
            gradient = without_answers(gradient) if isinstance(tensor, SplitTensor) else whole(gradient)
        elif isinstance(tensor, SplitTensor) and gradient is not None and tuple(gradient.shape) == whole_shape(tensor):
            gradient = part_of(gradient, tensor.lie.dim, tensor.lie.split, tensor.lie.axis.rank)
        own.append(gradient)
    return tensors, tuple(own)
