"""Hooks of ours on the user's modules, known as such to who copies a module."""

from collections.abc import Callable
from typing import Any

from torch._compile import _disable_dynamo


class ModuleHook:
    """A hook of ours on a module: a copy of the module goes without it. Compilers call it as it is."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    @_disable_dynamo
    def __call__(self, *args: Any) -> Any:
        return self.call(*args)
