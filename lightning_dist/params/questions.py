"""Torch functions that ask about a tensor without reading its values.

Stand-ins (a parameter whose values rest sharded, a tensor of which each rank holds a part) answer these at once; only
what is in neither table needs the values. Questions about the shape stand apart: what the user sees is the whole shape,
whatever the size of the piece behind it.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.core.shard import cut_of


def _getters(names: Iterable[str]) -> set[object]:
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


QUESTIONS: set[object] = _getters(
    [
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "grad",
        "grad_fn",
        "is_leaf",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_mkldnn",
        "is_xpu",
        "is_mps",
        "itemsize",
        "output_nr",
        "retains_grad",
        "_backward_hooks",
        "_version",
        "_post_accumulate_grad_hooks",
    ]
) | {
    vars(torch._C.TensorBase)["grad"].__set__,
    vars(torch._C.TensorBase)["requires_grad"].__set__,
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.is_signed,
    torch.Tensor.requires_grad_,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
    torch.Tensor.untyped_storage,
    torch.Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
}
"""Answered alike for a whole tensor and for a piece of it."""

_Shape = tuple[int, ...]


def _size(shape: _Shape, dim: int | None = None) -> Any:
    return torch.Size(shape) if dim is None else shape[dim]


def _stride(shape: _Shape, dim: int | None = None) -> Any:
    strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return strides if dim is None else strides[dim]


SHAPE_QUESTIONS: dict[object, Callable[..., Any]] = {
    torch.Tensor.size: _size,
    torch.Tensor.dim: lambda shape: len(shape),
    torch.Tensor.ndimension: lambda shape: len(shape),
    torch.Tensor.numel: lambda shape: prod(shape),
    torch.Tensor.nelement: lambda shape: prod(shape),
    torch.numel: lambda shape: prod(shape),
    torch.Tensor.__len__: lambda shape: shape[0],
    torch.Tensor.stride: _stride,
    getattr(torch.Tensor, "shape").__get__: lambda shape: torch.Size(shape),  # noqa: B009 (a descriptor)
    getattr(torch.Tensor, "ndim").__get__: lambda shape: len(shape),  # noqa: B009
}
"""Answered from the whole shape, as of a contiguous tensor."""


CLASS = "_lightning_dist_class"
"""Attribute of a parameter whose class, when its values are here, is not `nn.Parameter`."""


def own_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    """The class of a parameter whose values are here."""
    kind: type[nn.Parameter] = parameter.__dict__.get(CLASS, nn.Parameter)
    return kind


def shape_of_piece(tensor: Tensor) -> torch.Size:
    """The shape of what this rank holds."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.shape


def seen_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape that user code sees of a parameter, wherever its values are and however they are cut."""
    cut = cut_of(tensor)
    return tuple(shape_of_piece(tensor)) if cut is None else cut.shape


def without_answers(tensor: Tensor) -> Tensor:
    """The piece that this rank holds, as a plain tensor in the same graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def in_words(name: str, parameter: nn.Parameter) -> str:
    """Name, dtype, shape and whether it is trained."""
    return f"{name}: {parameter.dtype}{list(parameter.shape)}, trained: {parameter.requires_grad}"
