"""The user's own optimizers, made to update this rank's fragments in place of parameters.

An optimizer is built on the parameters, by code that knows nothing of fragments. Adopting it exchanges what its groups
hold and moves its state along; hooks around its step take over what user code wrote before it, and spread the result
after it.
"""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks
from torch.utils.hooks import RemovableHandle

from lightning_dist.core.errors import ConfigurationError, LightningDistError
from lightning_dist.core.stages import Placement
from lightning_dist.zero.probe import probe, probe_stages
from lightning_dist.zero.slot import Slot

if TYPE_CHECKING:
    from lightning_dist.zero.engine import ZeroEngine


class Adoption:
    """What an engine does with optimizers.

    Attributes:
        state_bytes_per_element: of the adopted optimizer that keeps the most; 0 where none had to be tried.
    """

    def __init__(self, engine: "ZeroEngine") -> None:
        self.engine = engine
        self.state_bytes_per_element = 0.0

    def adopt(self, optimizer: Optimizer) -> None:
        """Let `optimizer`, built on the module's parameters, update this rank's fragments in their place.

        Its group dicts stay the same objects, so schedulers keep working; state made in the constructor moves along.
        May be called again after parameters were added to it.

        Raises:
            UnsupportedOptimizerError: its update is not elementwise; or, where parameters are whole on the stages of a
                pipeline, it is not the same for each of them alone.
            ConfigurationError: it holds a parameter that the module does not have.
        """
        slots, held = self.engine.slots, _held_by(optimizer)
        foreign = [p for p in held if p not in slots]
        if foreign:
            raise ConfigurationError(
                f"{type(optimizer).__name__} holds {len(foreign)} parameters that are not in the module, the first of "
                f"shape {tuple(foreign[0].shape)}: register them as attributes of the module"
            )
        if self.has_parameters(held):
            if self.engine.row.optimizer is Placement.SHARD or any(slots[p].cut is not None for p in held):
                self.state_bytes_per_element = max(
                    self.state_bytes_per_element, probe(optimizer).state_bytes_per_element
                )
            elif any(slot.group.home is not None for slot in slots.values()):
                probe_stages(optimizer)
            for param_group in optimizer.param_groups:
                param_group["params"] = [self._exchange(optimizer, p) for p in param_group["params"]]
        if not any(getattr(hook, "__self__", None) is self for hook in optimizer._optimizer_step_post_hooks.values()):
            optimizer.register_step_pre_hook(self._stepping)
            optimizer.register_step_post_hook(self._stepped)
            optimizer.zero_grad = _ZeroGrad(self.engine, optimizer)  # type: ignore[method-assign]

    def _exchange(self, optimizer: Optimizer, parameter: nn.Parameter) -> nn.Parameter:
        slot = self.engine.slots[parameter]
        if slot.fragment is parameter:
            return parameter
        state = optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[slot.fragment] = {k: shard_state(v, slot) for k, v in state.items()}
        return slot.fragment

    def has_parameters(self, held: Iterable[nn.Parameter]) -> bool:
        """Whether there are parameters among these whose fragments should be there in their place."""
        slots = self.engine.slots
        return any(slots[p].fragment is not p for p in held if p in slots)

    def needed_by(self, optimizer: Optimizer) -> bool:
        """Whether parameters of the module were added to it since it was adopted."""
        held = _held_by(optimizer)
        return self.has_parameters(held) or any(p not in self.engine.slots for p in held)

    def _stepping(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What user code wrote into parameters goes to the masters before they are updated: after the closure."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.engine.notice_writes()
            return args, kwargs

        def noticing() -> Any:
            result = closure()
            self.engine.notice_writes()
            return result

        if len(args) > 1:
            return (args[0], noticing, *args[2:]), kwargs
        return args, {**kwargs, "closure": noticing}

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        updated = {id(p) for p in _held_by(optimizer)}
        self.engine.updated([g for g in self.engine.groups if any(id(slot.fragment) in updated for slot in g.slots)])


class InsistOnAdoption:
    """Looks at every optimizer before its step: on sharded parameters it would find no gradients, and decay weights.

    torch walks its list of such hooks while a collection may free an engine, so a hook that outlives its engine stays,
    does nothing, and is removed when the next one is registered.
    """

    @classmethod
    def register(cls, adoption: Adoption) -> RemovableHandle:
        """One for this engine, in the place of those whose engines are gone."""
        hooks = optimizer_hooks._global_optimizer_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, cls) and hook.adoption() is None]:
            del hooks[key]
        return optimizer_hooks.register_optimizer_step_pre_hook(cls(weakref.ref(adoption)))

    def __init__(self, adoption: "weakref.ref[Adoption]") -> None:
        self.adoption = adoption

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        adoption = self.adoption()
        if adoption is not None and adoption.has_parameters(_held_by(optimizer)):
            raise LightningDistError(
                f"{type(optimizer).__name__} holds parameters that are sharded, but was not adopted before its step: "
                "call engine.adopt(optimizer), or under the Trainer return it from configure_optimizers. To train the "
                "module under a strategy of another package, give that a copy: copy.deepcopy(module) inside `with "
                "strategy.gathered(module):`, or load strategy.full_state_dict()"
            )


class _ZeroGrad:
    """``optimizer.zero_grad`` that also frees the buffers behind gradients which it has set to None."""

    def __init__(self, engine: "ZeroEngine", optimizer: Optimizer) -> None:
        self.engine, self.optimizer = engine, optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        type(self.optimizer).zero_grad(self.optimizer, *args, **kwargs)
        self.engine.forget_zeroed()


def shard_state(value: Any, slot: Slot) -> Any:
    """This rank's part of optimizer state that has the (whole) shape of the parameter; other state as it is."""
    spec = slot.group.spec(slot)
    if not isinstance(value, Tensor) or tuple(value.shape) != spec.global_shape or value.ndim == 0:
        return value
    part = slot.part_of(value.detach()).reshape(-1)[spec.start : spec.stop].clone()
    return part if slot.group.sharded_state or not slot.group.here else part.view(slot.shape)


def _held_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
