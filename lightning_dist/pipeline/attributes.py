"""What user code keeps in attributes of modules besides parameters, buffers and parts: plain data.

A stage runs steps that only another stage runs to their end, and a rehearsal runs one that nobody asked for. What these
runs leave in attributes (a count of calls, a list of losses) must be seen, and undone.
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (int, float, bool, str, bytes, complex, type(None), Tensor, np.ndarray)
_CONTAINERS = (list, tuple, dict, set, deque)
_OF_MODULES = frozenset(vars(nn.Module()))


def attributes(part: nn.Module, but: frozenset[str] = _OF_MODULES) -> dict[str, Any]:
    """The plain data in a module's own attributes, but for those of these names."""
    held = vars(part)
    return {
        name: held[name]
        for name in held.keys() - but
        if not name.startswith("_lightning_dist") and _is_plain(held[name])
    }


class Seen:
    """A value as it was: which object, how large, and how often a tensor was written."""

    def __init__(self, value: Any) -> None:
        self.value, self.size, self.version = value, _size(value), _version(value)
        self.copy: Any = None
        self.inner: list[Seen] = []

    def keep(self) -> "Seen":
        """Keep what is in it, so that it can be restored: the values of a tensor, and of containers what they hold."""
        if isinstance(self.value, Tensor):
            self.copy = self.value.detach().clone()
        elif isinstance(self.value, (*_CONTAINERS, np.ndarray)):
            self.copy = copy.copy(self.value)
            self.inner = [Seen(item).keep() for item in _items(self.value) if isinstance(item, _CONTAINERS)]
        return self

    def has_grown(self, value: Any) -> bool:
        """Whether it is a list to which something may have been appended, and nothing else was done."""
        return isinstance(value, list) and value is self.value and self.size is not None and len(value) >= self.size

    def may_differ(self, value: Any) -> bool:
        """Whether `value`, now in its place, may be another."""
        same = value is self.value and _size(value) == self.size and _version(value) == self.version
        return not same or isinstance(value, (dict, list, set, deque, np.ndarray))

    def restored(self) -> Any:
        """The object, as it was when it was kept."""
        value, kept = self.value, self.copy
        if isinstance(value, (list, deque)):
            value.clear()
            value.extend(kept)
        elif isinstance(value, (dict, set)):
            value.clear()
            value.update(kept)
        elif isinstance(value, np.ndarray):
            value[...] = kept
        elif isinstance(value, Tensor) and _version(value) != self.version:
            with torch.no_grad():
                value.copy_(kept)
        for seen in self.inner:
            seen.restored()
        return value


@contextmanager
def same_attributes_after(parts: Iterable[nn.Module]) -> Iterator[None]:
    """What the block does to plain data of these modules is undone.

    Hooks that it registers stay; then flags stay as they are too, since one of them may be the note of it.
    """
    before = [(part, {name: Seen(value).keep() for name, value in attributes(part).items()}) for part in parts]
    hooks = number_of_hooks(part for part, _ in before)
    try:
        yield
    finally:
        as_many = number_of_hooks(part for part, _ in before) == hooks
        for part, seen in before:
            restore(part, seen, flags=as_many)


def number_of_hooks(parts: Iterable[nn.Module]) -> int:
    """Forward hooks of these modules."""
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in parts)


def restore(
    part: nn.Module, before: Mapping[str, Seen], but: frozenset[str] = _OF_MODULES, *, flags: bool = True
) -> None:
    """Plain data of a module as it was; what has come since goes.

    Args:
        flags: whether that holds for truth values, too.
    """
    held = attributes(part, but)
    for name in held.keys() - before.keys():
        if flags or not isinstance(held[name], bool):
            del vars(part)[name]
    for name, seen in before.items():
        if flags or not isinstance(seen.value, bool):
            vars(part)[name] = seen.restored()


def _is_plain(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return True
    return isinstance(value, _CONTAINERS) and all(map(_is_plain, _items(value)))


def _items(container: Any) -> Iterable[Any]:
    return (*container.keys(), *container.values()) if isinstance(container, dict) else container


def _version(value: Any) -> int:
    """How often a tensor was written in place."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _size(value: Any) -> int | None:
    return len(value) if isinstance(value, (list, dict, set, deque)) else None
