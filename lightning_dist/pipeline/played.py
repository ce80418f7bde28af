"""A layer that is not computed here, shown to whoever watches it: its code runs with fakes, and its hooks fire.

Most layers of other stages are passed at no cost: what they return is known from the rehearsal. But forward hooks must
fire, or who collects the states of all layers gets those of this stage with shifted numbers; and a layer that is given
a list or a dict may change it in place. Such a layer is called with fakes. What hooks collect then is fake where it has
no values here, and is refused by name where it is used.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _of_torch
from torch.utils import _pytree as pytree

from lightning_dist.core.errors import UnsupportedModelError
from lightning_dist.params.hooks import ModuleHook
from lightning_dist.pipeline.fakes import Fakes, ValuesReadError, as_computed, is_fake


def must_be_called(part: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether what a module returns is not all that a call of it does."""
    return any(map(_can_change, args)) or any(map(_can_change, kwargs.values())) or _is_watched(part)


def _can_change(value: object) -> bool:
    return isinstance(value, (list, dict)) or (isinstance(value, tuple) and any(map(_can_change, value)))


def in_its_place(of: Callable[[Any], Any], value: Any) -> Any:
    """Map a structure as `pytree.tree_map` does; lists and dicts stay the same objects, as they are the user's."""
    if isinstance(value, (list, dict)):
        for key in value if isinstance(value, dict) else range(len(value)):
            new = in_its_place(of, value[key])
            if new is not value[key]:
                value[key] = new
        return value
    if type(value) is tuple:
        return tuple(in_its_place(of, item) for item in value)
    return pytree.tree_map(of, value)


def _is_watched(part: nn.Module) -> bool:
    return any(not isinstance(hook, ModuleHook) for table in _tables(part) for hook in table.values())


def _tables(part: nn.Module) -> Iterator[dict[int, Any]]:
    """The forward hooks of a module, of those inside it, and of all modules, by kind."""
    yield _of_torch._global_forward_pre_hooks
    yield _of_torch._global_forward_hooks
    for inner in part.modules():
        if inner._forward_pre_hooks:
            yield inner._forward_pre_hooks
        if inner._forward_hooks:
            yield inner._forward_hooks


def call_with_zeros(
    fakes: Fakes, layer: nn.Module, name: str, args: Any, kwargs: Any, itself: Callable[..., Any]
) -> Any:
    """A fake output of a layer that looks at values (which expert gets which token): it is shown zeros.

    Args:
        itself: a context within which calls of the layer are not played.

    Raises:
        UnsupportedModelError: a hook reads or changes values, or the layer changes what it was given in place.
    """
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_fake(leaf)]
    trained = any(p.requires_grad for p in layer.parameters()) or any(fake.requires_grad for fake in given)
    grads = trained and torch.is_grad_enabled()
    values = {key: torch.zeros(p.shape, dtype=p.dtype, device=p.device) for key, p in layer.named_parameters()}
    args, kwargs = pytree.tree_map(_zeros_for_fakes, (args, kwargs))
    before = pytree.tree_structure((args, kwargs))

    def fake(tensor: Tensor) -> Tensor:
        return fakes.like(tensor, name, requires_grad=grads and tensor.is_floating_point())

    with itself(layer), _hooks_see_fakes(layer, name, fake), torch.no_grad():
        output = torch.func.functional_call(layer, values, args, kwargs)
    if pytree.tree_structure((args, kwargs)) != before:
        raise UnsupportedModelError(
            f"{name} looks at values and changes a list or dict that it was given. On stages that do not compute it "
            "the change would be missing: return what it adds, and pass it through the layers"
        )
    return pytree.tree_map_only(Tensor, lambda tensor: as_computed(fake(tensor)), output)


@contextmanager
def _hooks_see_fakes(layer: nn.Module, name: str, fake: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block hooks are given fakes for the zeros, which nobody must take for values."""

    def seeing(hook: Callable[..., Any]) -> Callable[..., None]:
        said = f"a forward hook in {name} ({getattr(hook, '__qualname__', type(hook).__name__)})"

        def see(module: nn.Module, *seen: Any) -> None:
            try:
                answer = hook(module, *pytree.tree_map_only(Tensor, fake, seen))
            except ValuesReadError as error:
                raise UnsupportedModelError(f"{said} reads values: {error}") from None
            if answer is not None:
                raise UnsupportedModelError(
                    f"{said} changes what passes by, in a layer that looks at values. Such a layer cannot be run "
                    "without them on other pipeline stages: do in the layer's forward what the hook does"
                )

        return see

    tables = [(table, dict(table)) for table in _tables(layer)]
    try:
        for table, hooks in tables:
            table.update({key: h if isinstance(h, ModuleHook) else seeing(h) for key, h in hooks.items()})
        yield
    finally:
        for table, hooks in tables:
            table.update(hooks)


def uncompiled() -> AbstractContextManager[object]:
    """Within this context what is compiled runs as it was written: a compiler takes no fakes for parameters."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def same_buffers_after(module: nn.Module) -> Iterator[None]:
    """What the block writes to buffers or puts in their place (a count of batches, batch statistics) is undone."""
    before = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers()]
    places = [(part._buffers, dict(part._buffers)) for part in module.modules() if part._buffers]
    try:
        yield
    finally:
        for buffers, held in places:
            buffers.update(held)
        with torch.no_grad():
            for buffer, version, values in before:
                if buffer._version != version or not torch.equal(buffer, values):  # norms write without counting it
                    buffer.copy_(values)


def _zeros_for_fakes(leaf: object) -> object:
    """Zeros for a fake; nothing for objects such as a cache, in which the first attempt may have left fakes."""
    if isinstance(leaf, Tensor):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if is_fake(leaf) else leaf
    plain = isinstance(leaf, (int, float, str, torch.dtype, torch.device, type(None), type(Ellipsis)))
    return leaf if plain or callable(leaf) else None
