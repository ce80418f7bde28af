"""Tensors inside whatever a module takes or returns."""

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def tensors_in(value: object, depth: int = 3) -> list[Tensor]:
    """All tensors in nested containers, dataclasses and plain objects."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)):
            found += tensors_in(list(vars(leaf).values()), depth - 1)
    return found
