"""A batch in micro-batches, and what their steps return put together again.

Dim 0 of every tensor of a batch is its samples. They are divided as evenly as can be (8 samples in 3: 3, 3, 2); a batch
with fewer samples than micro-batches makes as many as it has samples. A list of as many plain values as there are
samples (texts, names of files) is divided too.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_dist.core.errors import ConfigurationError

REMEDY = (
    "If the batch is laid out in another way, say how it is divided: def split_batch(self, batch, num_micro_batches) "
    "in the module, which returns the micro-batches"
)


def count_samples(batch: Any) -> int:
    """The size of dim 0 of all tensors of a batch.

    Raises:
        ConfigurationError: there is no tensor with a dim 0, or they disagree.
    """
    sizes: dict[int, str] = {}
    for path, leaf in tensors_in(batch, "batch"):
        if leaf.ndim:
            sizes.setdefault(leaf.shape[0], f"{path} of shape {tuple(leaf.shape)}")
    if not sizes:
        raise ConfigurationError(
            f"the batch, a {type(batch).__name__}, holds no tensor with samples in dim 0, so it cannot be divided into "
            f"micro-batches. {REMEDY}"
        )
    if len(sizes) > 1:
        raise ConfigurationError(
            f"the tensors of the batch disagree about the number of samples (dim 0): {', '.join(sizes.values())}. "
            f"{REMEDY}"
        )
    samples = next(iter(sizes))
    if samples == 0:
        raise ConfigurationError("the batch has no samples (dim 0 of its tensors is 0)")
    return samples


def split_batch(batch: Any, num_micro_batches: int) -> list[Any]:
    """`num_micro_batches` parts of a batch, or as many as it has samples if these are fewer; views, in order."""
    samples = count_samples(batch)
    parts = min(num_micro_batches, samples)
    return [_part(batch, samples * part // parts, samples * (part + 1) // parts, samples) for part in range(parts)]


def tensors_in(value: Any, path: str) -> list[tuple[str, Tensor]]:
    """The tensors of a structure, with where they are in it."""
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in tensors_in(item, f"{path}[{key!r}]")]
    if isinstance(value, (list, tuple)):
        return [found for index, item in enumerate(value) for found in tensors_in(item, f"{path}[{index}]")]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return [found for name in names for found in tensors_in(getattr(value, name), f"{path}.{name}")]
    return []


def _part(value: Any, start: int, stop: int, samples: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.ndim else value
    part: Callable[[Any], Any] = lambda item: _part(item, start, stop, samples)  # noqa: E731
    if isinstance(value, Mapping):
        return _like(value, {key: part(item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(part, value))
    if isinstance(value, (list, tuple)):
        if len(value) == samples and not tensors_in(value, ""):
            return value[start:stop]
        return type(value)(map(part, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: part(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same class, for those that can be made from one (as a Hugging Face BatchEncoding can)."""
    if type(mapping) is dict:
        return items
    try:
        return type(mapping)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def signature(value: Any) -> object:
    """What the shapes inside a step may depend on: the shapes, dtypes and plain numbers of a batch, and its form."""
    leaves, tree = pytree.tree_flatten(value if not isinstance(value, Mapping) else dict(value))
    said: list[object] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            said.append((tuple(leaf.shape), leaf.dtype))
        elif isinstance(leaf, Mapping) or dataclasses.is_dataclass(leaf):
            said.append((type(leaf), tuple((path, tuple(t.shape), t.dtype) for path, t in tensors_in(leaf, ""))))
        else:
            said.append(leaf if isinstance(leaf, (int, bool, type(None))) else type(leaf))
    return tuple(said), str(tree)


def merge(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """What the steps of the micro-batches returned, as the step of the whole batch would have.

    Per-sample tensors and lists are put one after the other; scalars are averaged by `weights`; what is the same in all
    is kept; anything else comes as a list, one entry for each micro-batch.
    """
    first = outputs[0]
    if len(outputs) == 1 and weights[0]:
        return first
    if any(type(output) is not type(first) for output in outputs):
        return list(outputs)
    if isinstance(first, Tensor):
        return _merge_tensors(list(outputs), sizes, weights)

    def inner(items: Sequence[Any]) -> Any:
        return merge(items, sizes, weights)

    if isinstance(first, Mapping) and all(output.keys() == first.keys() for output in outputs):
        return _like(first, {key: inner([output[key] for output in outputs]) for key in first})
    if isinstance(first, (list, tuple)):
        if not tensors_in(first, "") and all(len(o) == n for o, n in zip(outputs, sizes, strict=True)):
            return type(first)(item for output in outputs for item in output)
        if all(len(output) == len(first) for output in outputs):
            merged = [inner(list(items)) for items in zip(*outputs, strict=True)]
            return type(first)(*merged) if hasattr(first, "_fields") else type(first)(merged)
        return list(outputs)
    if isinstance(first, float):
        return sum(output * weight for output, weight in zip(outputs, weights, strict=True) if weight)
    return first if all(_same(output, first) for output in outputs) else list(outputs)


def _same(one: object, other: object) -> bool:
    same: object = one == other
    return same is True


def _merge_tensors(tensors: list[Tensor], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    if all(tensor.ndim and tensor.shape[0] == size for tensor, size in zip(tensors, sizes, strict=True)):
        if all(tensor.shape[1:] == tensors[0].shape[1:] for tensor in tensors):
            return torch.cat(tensors)
        return tensors
    alike = all(tensor.shape == tensors[0].shape for tensor in tensors)
    if alike and tensors[0].is_floating_point():
        return weighted_sum(tensors, weights)
    return tensors


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum of ``tensor * weight``. What weighs nothing does not count, even if it is NaN (the mean of nothing)."""
    weighed = [tensor * weight for tensor, weight in zip(tensors, weights, strict=True) if weight]
    return torch.stack(weighed).sum(0) if weighed else torch.zeros_like(tensors[0])
