"""Hooks that make a unit present for its forward and its backward, and release it after each.

Forward: gathered before, released after. Backward begins for a unit when the gradient of its output is known
(gather), and is over when the gradients of its inputs are (release, and reduce unless a parameter is used elsewhere
too, in a penalty say, and its gradient is still to come). Those hooks are for timing. That nothing
wrong is ever read rests on something else: tensors that autograd saves during the unit's forward are packed with a
note of the unit whose storage they share, and unpacking gathers it. So an output that leaves by a side door (an
auxiliary loss kept as an attribute, a captured activation) cannot meet a released buffer.

Activation recompute runs a unit's forward again inside backward: then nothing is released until that is over. When
another saved-tensor hook is active (a checkpointed region, offloading), ours stays away: recompute calls the modules,
and with them these hooks, again.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lightning_dist.core.stages import Placement
from lightning_dist.params.hooks import ModuleHook
from lightning_dist.zero.flat import FlatGroup
from lightning_dist.zero.gather import Unit
from lightning_dist.zero.slot import Slot
from lightning_dist.zero.trees import tensors_in

if TYPE_CHECKING:
    from lightning_dist.zero.engine import ZeroEngine


class UnitHooks:
    """All hooks of an engine. `contexts` is the stack of forwards that are under way."""

    def __init__(self, engine: "ZeroEngine") -> None:
        self.engine = engine
        self.sharded = engine.row.parameter is Placement.SHARD
        self._storages = {g.compute.untyped_storage()._cdata: u for u in engine.units for g in u.groups}
        self._contexts: list[torch.autograd.graph.saved_tensors_hooks | None] = []

    def install(self, module: nn.Module, unit: Unit) -> list[RemovableHandle]:
        """Hook one module whose forward needs `unit`."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            self._before_forward(unit, (args, kwargs))
            return self._cast(unit, (args, kwargs))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            self._after_forward(unit, output)

        return [
            module.register_forward_pre_hook(ModuleHook(before), with_kwargs=True),
            module.register_forward_hook(ModuleHook(after), always_call=True),
        ]

    def install_for_writes(self, module: nn.Module) -> RemovableHandle:
        """Hook a module whose own parameters are always there in a step, so that its forward sees what was written."""

        def before(_: nn.Module, __: Any) -> None:
            if self.engine.writes_may_follow and not self._in_backward:
                self.engine.show_writes()

        return module.register_forward_pre_hook(ModuleHook(before))

    def watch(self, slot: Slot) -> RemovableHandle:
        """Hook a parameter, so that its gradients are taken as they come.

        The hook sees the engine weakly: torch keeps such hooks in C++, where a cycle would never be collected.
        """
        engine_ref, slot_ref = weakref.ref(self.engine), weakref.ref(slot)

        def arrived(_: Tensor) -> None:
            engine, slot = engine_ref(), slot_ref()
            assert engine is not None
            assert slot is not None
            engine.gradient_arrived(slot)

        return on_gradient(slot.parameter, arrived)

    @property
    def _in_backward(self) -> bool:
        return self.engine.reducer.running

    def _before_forward(self, unit: Unit, inputs: object) -> None:
        engine = self.engine
        self._contexts.append(None)  # `_after_forward` takes it away also where the rest of this fails
        if engine.writes_may_follow and not self._in_backward:
            engine.show_writes()
        if not self._in_backward:
            unit.calls += 1
        if self.sharded:
            engine.gatherer.need(unit)
        if torch.is_grad_enabled() and not self._in_backward:
            self._watch_inputs(unit, inputs)
        self._contexts[-1] = self._save_context()

    def _cast(self, unit: Unit, inputs: tuple[Any, Any]) -> tuple[Any, Any] | None:
        """In mixed precision, inputs in the masters' dtype become what the layer computes in."""
        group = unit.groups[0]
        wide, narrow = group.master_dtype, group.compute_dtype
        if wide == narrow or unit.shown:
            return None

        def narrowed(leaf: Any) -> Any:
            return leaf.to(narrow) if isinstance(leaf, Tensor) and leaf.dtype == wide else leaf

        args, kwargs = pytree.tree_map(narrowed, inputs)
        return args, kwargs

    def _save_context(self) -> torch.autograd.graph.saved_tensors_hooks | None:
        others: object | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if not self.sharded or not torch.is_grad_enabled() or others is not None:
            return None
        context = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        context.__enter__()
        return context

    def _pack(self, tensor: Tensor) -> object:
        if isinstance(tensor, FakeTensor):
            return None, tensor.detach(), 0  # torch hands over the saved output itself: a cycle that is never collected
        return self._storages.get(tensor.untyped_storage()._cdata), tensor, tensor._version

    def _unpack(self, packed: Any) -> Tensor:
        unit, tensor, version = packed
        if tensor._version != version:  # autograd leaves this check to those who pack
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified in place after it was "
                "saved: write `y = y * 2` in place of `y *= 2` where y is used before"
            )
        if unit is not None:
            self.engine.gatherer.need_again(unit)
        return tensor  # type: ignore[no-any-return]

    def _after_forward(self, unit: Unit, output: object) -> None:
        context = self._contexts.pop()
        if context is not None:
            context.__exit__()
        if self._in_backward or not self.sharded:
            return
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    on_tensor_gradient(tensor, self._make_enter(unit))
        if not self.engine.gatherer.needs_next(unit):
            unit.release()

    def _make_enter(self, unit: Unit) -> Callable[[Tensor], None]:
        def enter(_: Tensor) -> None:
            self.engine.gatherer.need(unit)

        return enter

    def _watch_inputs(self, unit: Unit, inputs: object) -> None:
        """Know when backward has passed this call: all its inputs that have a history have their gradient."""
        watched = [t for t in tensors_in(inputs) if t.grad_fn is not None]
        unit.open_calls += 1
        left = len(watched)

        def passed(_: Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._call_over(unit)

        for tensor in watched:
            on_tensor_gradient(tensor, passed)

    def _call_over(self, unit: Unit) -> None:
        if not self._in_backward:
            return
        unit.open_calls -= 1
        if unit.open_calls == 0:
            for group in unit.groups:
                if not any(will_come(slot.parameter) for slot in self.engine.reducer.awaited(group)):
                    self.engine.reducer.complete(group)
            self._release(unit)

    def gradients_complete(self, unit: Unit, group: FlatGroup) -> None:
        """Every parameter of the group has got its gradient in this backward."""
        if unit.calls > 1:
            return  # more may come, from its other calls
        self.engine.reducer.complete(group)
        self._release(unit)

    def _release(self, unit: Unit) -> None:
        if self.sharded and not self.engine.gatherer.needs_next(unit):
            unit.release()

    def backward_over(self) -> None:
        """Forget calls whose backward never came."""
        for unit in self.engine.units:
            unit.calls = unit.open_calls = 0


def on_tensor_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` when the gradient of a tensor inside the graph is known."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def on_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook` whenever autograd has put a gradient into a parameter, also one that is frozen now."""
    with _trainable(parameter):
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def will_come(parameter: nn.Parameter) -> bool:
    """Whether the backward that runs now puts a gradient into this parameter (or has done so)."""
    return bool(torch._C._will_engine_execute_node(_accumulation_node(parameter)))


def _accumulation_node(parameter: nn.Parameter) -> Node:
    """The node of the graph that puts gradients into a parameter.

    While a graph of the parameter lives, this is that graph's node. It is asked for anew each time: a node that Python
    keeps would keep the parameter, its hooks and the engine alive, in a cycle through C++ that is never collected.
    """
    with _trainable(parameter), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        view = parameter.view_as(parameter).grad_fn
    assert view is not None
    node = view.next_functions[0][0]
    assert node is not None
    return node


@contextmanager
def _trainable(parameter: nn.Parameter) -> Iterator[None]:
    """torch registers hooks and builds graphs only for what requires a gradient."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(not frozen)
