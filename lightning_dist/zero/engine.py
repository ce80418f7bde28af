"""The ZeRO engine: data parallelism without redundant copies, around a module that knows nothing of it.

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054). The engine takes over the parameters of a module in place, unit
by unit (`units`, `flat`), gathers them when their forward or backward needs them (`gather`), reduces gradients
while backward runs (`reduce`), and lets the user's own optimizer update flat fragments (`adopt`). The stage decides
what is sharded, by the table in `core.stages`.

In a plain loop::

    mesh = Mesh.from_world(Layout(dp=world_size))
    engine = ZeroEngine(model, mesh, stage=3)
    optimizer = torch.optim.AdamW(model.parameters())
    engine.adopt(optimizer)
    for batch in batches:
        with engine.step():
            engine.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
"""

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks
from torch.utils.hooks import RemovableHandle

from lightning_dist.comm.collectives import Pending
from lightning_dist.comm.mesh import Mesh
from lightning_dist.comm.rollcall import Place
from lightning_dist.core.errors import ConfigurationError, LightningDistError, ReleasedParameterError
from lightning_dist.core.shard import Home, ShardSpec, home_of
from lightning_dist.core.stages import Placement, stage_row
from lightning_dist.params.questions import own_class
from lightning_dist.zero import copies, guard
from lightning_dist.zero.aside import Aside
from lightning_dist.zero.buffers import BufferSync
from lightning_dist.zero.flat import FlatGroup, Residency, Slot
from lightning_dist.zero.gather import Gatherer, Unit
from lightning_dist.zero.gathered import gathered_outside_step, gathered_within_step
from lightning_dist.zero.hooks import UnitHooks, on_gradient
from lightning_dist.zero.pool import BufferPool
from lightning_dist.zero.probe import probe
from lightning_dist.zero.reduce import MAX_IN_FLIGHT, Reducer
from lightning_dist.zero.refusals import insist_on_equal_modules, refuse_unsupported
from lightning_dist.zero.units import ROOT, NamedParameter, find_units

Accumulate = Literal["shard", "local"]
StepKind = Literal["train", "eval"]


@dataclass(frozen=True)
class Piece:
    """A parameter as this rank holds it: where it sits, its fragment, all of its names, and who holds the rest."""

    spec: ShardSpec
    slot: Slot

    @property
    def values(self) -> Tensor:
        """This rank's part in the master dtype, flat; a view."""
        return self.slot.group.piece(self.slot.group.owned, self.slot)


class ZeroEngine:
    """Shards `module` in place over the data-parallel axis of `mesh`; all ranks construct it alike.

    Args:
        module: any module on the mesh's device, the same on all ranks (rank 0's values are taken).
        mesh: where to shard; only its `dp` axis is used.
        stage: ZeRO stage 0 to 3.
        compute_dtype: dtype of the values that forward and backward use; None computes in the parameters' own dtype.
            The optimizer always updates masters in the parameters' own dtype.
        accumulate: what stages 2 and 3 do with the gradients of micro-batches before the last: reduce them at once
            and keep the shard, or keep the whole sum locally and reduce once.
        prefetch_bytes: how much may be gathered ahead of need; by default as much as the largest unit.

    Raises:
        ConfigurationError: an argument that does not exist.
        UnsupportedModelError: a parameter that cannot be sharded, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        stage: int,
        compute_dtype: torch.dtype | None = None,
        accumulate: Accumulate = "shard",
        prefetch_bytes: int | None = None,
    ) -> None:
        self.module, self.mesh, self.stage, self.row = module, mesh, stage, stage_row(stage)
        if accumulate not in ("shard", "local"):
            raise ConfigurationError(f'accumulate="{accumulate}" does not exist; use "shard" or "local"')
        if any(guard.is_owned(parameter) for parameter in module.parameters()):
            raise ConfigurationError(
                "the module is sharded already, by another engine: call that engine's remove() on all ranks before "
                "constructing a new one"
            )
        self.shards_each_micro_batch = self.row.gradient is Placement.SHARD and accumulate == "shard"
        refuse_unsupported(module, mesh.device)
        insist_on_equal_modules(module, mesh.rollcall)
        self.pool = BufferPool(mesh.device)
        self.units = self._make_units(compute_dtype)
        self.groups = [group for unit in self.units for group in unit.groups]
        self.slots = {slot.parameter: slot for group in self.groups for slot in group.slots}
        largest = max((unit.num_bytes for unit in self.units), default=0)
        self.prefetch_bytes = largest if prefetch_bytes is None else prefetch_bytes
        self.gatherer = Gatherer(self.units, mesh.rollcall, prefetch_bytes=self.prefetch_bytes)
        self.reducer = Reducer(self.groups, mesh.rollcall)
        self.buffers = BufferSync(module, mesh)
        self.aside = Aside(self)
        self.state_bytes_per_element = 0.0
        self.in_step: StepKind | None = None
        self._held: list[Unit] = []
        self._loading = False
        self._removed = False
        self._warned: set[str] = set()
        self._handles: list[Any] = []
        self._hooks = UnitHooks(self)
        self._install()

    @classmethod
    def of(cls, module: nn.Module) -> "ZeroEngine | None":
        """The engine that has taken over (some of) the module's parameters, if one has."""
        owners = {guard.owner_of(p) for p in module.parameters() if guard.is_owned(p)}
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    # Construction ---------------------------------------------------------------------------------------------

    def _make_units(self, compute_dtype: torch.dtype | None) -> list[Unit]:
        units = []
        for index, plan in enumerate(find_units(self.module)):
            alike: dict[tuple[torch.dtype, bool, Home | None], list[NamedParameter]] = {}
            for item in plan.parameters:
                key = item.parameter.dtype, item.parameter.requires_grad, home_of(item.parameter)
                alike.setdefault(key, []).append(item)
            groups = [
                FlatGroup(
                    items,
                    row=self.row,
                    axis=self.mesh.dp,
                    peers=self.mesh.tp,
                    stages=self.mesh.pp,
                    home=home,
                    compute_dtype=compute_dtype,
                    device=self.mesh.device,
                    pool=self.pool,
                )
                for (_, _, home), items in alike.items()
            ]
            units.append(Unit(index, plan.name, groups, plan.callers))
        return units

    def _install(self) -> None:
        for unit in self.units:
            for caller in unit.callers:
                self._handles += self._hooks.install(caller, unit)
        for slot in self.slots.values():
            guard.own(slot.parameter, self)
            self._handles.append(on_gradient(slot.parameter, self._make_gradient_hook(slot)))
        copies.install(self.module)
        self._handles.append(_InsistOnAdoption.register(self))

    def _make_gradient_hook(self, slot: Slot) -> Callable[[Tensor], None]:
        """The hook sees the engine weakly: torch keeps such hooks in C++, where a cycle would never be collected."""
        unit = next(unit for unit in self.units if slot.group in unit.groups)
        engine_ref, slot_ref, unit_ref = weakref.ref(self), weakref.ref(slot), weakref.ref(unit)

        def arrived(_: Tensor) -> None:
            engine, slot, unit = engine_ref(), slot_ref(), unit_ref()
            assert engine is not None
            assert slot is not None
            assert unit is not None
            if engine.reducer.take(slot):
                engine._hooks.gradients_complete(unit, slot.group)

        return arrived

    def gradient_arrived(self, slot: Slot) -> None:
        """A parameter has got its gradient by other means than autograd."""
        if self.reducer.take(slot):
            unit = next(unit for unit in self.units if slot.group in unit.groups)
            self._hooks.gradients_complete(unit, slot.group)

    def remove(self) -> None:
        """Give the module back whole: full values in the parameters' own dtype, no hooks. Collective."""
        with self.gathered(self.module):
            values = {parameter: parameter.detach().clone() for parameter in self.slots}
        for handle in self._handles:
            handle.remove()
        for parameter, value in values.items():
            guard.show(parameter, value, whole=True)
            guard.disown(parameter)
            parameter.grad = None
        copies.uninstall(self.module)
        self.mesh.rollcall.help_gather = None
        self._removed = True

    def _insist_on_module(self) -> None:
        if self._removed:
            raise LightningDistError(
                "this engine has given its module back by remove(), so it can neither train nor gather it: construct "
                "a new ZeroEngine"
            )

    # Steps ----------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, kind: StepKind = "train") -> Iterator[None]:
        """The scope of one step: forward passes and, when training, their backward. All ranks enter it."""
        if self.in_step is not None:
            raise LightningDistError("steps do not nest: leave the `with engine.step()` block before entering another")
        self.begin_step(kind)
        try:
            yield
            self.meet()
        finally:
            self.end_step()

    def begin_step(self, kind: StepKind = "train") -> None:
        """Enter a step; ends the last one if that was left open."""
        self._insist_on_module()
        self.end_step()
        self.in_step = kind
        self.forget_zeroed()
        self.notice_writes()
        written = [group for group in self.groups if group.masters_written()]
        if written:
            self.refresh(written)
        self.buffers.sync()
        self.buffers.stale = kind == "train"  # also if no backward follows; see `backward` else
        self.gatherer.begin(kind)
        for unit in self.units:
            unit.calls = unit.open_calls = 0
            if unit.name == ROOT and self.row.parameter is Placement.SHARD:
                self.hold(unit)

    def forget_zeroed(self) -> None:
        """Notice gradients that were set to None, and free the buffers behind them."""
        for group in self.groups:
            group.forget_zeroed()
        self.pool.clear()

    def notice_writes(self) -> None:
        """Take over what user code wrote into parameters that are shown; local."""
        for group in self.groups:
            group.notice_writes()

    def end_step(self) -> None:
        """Leave a step: whatever is gathered is released."""
        self.in_step = None
        self._release_all()

    def meet(self) -> None:
        """Go on once all ranks have ended this step: until then a rank may need others for a gather."""
        if self.row.parameter is Placement.SHARD:
            self.mesh.rollcall.call(Place.STEP_END)

    def hold(self, unit: Unit) -> None:
        """Keep a unit gathered until backward or the step is over."""
        if unit not in self._held:
            unit.holds += 1
            self._held.append(unit)
        self.gatherer.need(unit)

    def _release_all(self) -> None:
        for unit in self._held:
            unit.holds -= 1
        self._held.clear()
        self._release_idle()

    def _release_idle(self) -> None:
        if self.row.parameter is Placement.SHARD:
            for unit in self.units:
                unit.release()

    def backward(self, loss: Tensor, *, sync: bool = True, run: Callable[[], object] | None = None) -> None:
        """Backward of `loss`, with its gradients averaged over the ranks on return.

        Args:
            sync: False for a micro-batch that is followed by others: stages 0 and 1, and `accumulate="local"`, then
                only sum locally.
            run: how to run backward; ``loss.backward()`` by default.
        """
        self._insist_on_module()
        if self.in_step is None:
            raise LightningDistError("backward outside a step: call it inside the `with engine.step()` of its forward")
        self.reducer.begin(reducing=sync or self.shards_each_micro_batch)
        self.gatherer.in_backward = True
        try:
            run() if run is not None else torch.autograd.backward(loss)
        except BaseException:
            self.reducer.abort()
            raise
        finally:
            self.gatherer.in_backward = False
        self._hooks.backward_over()
        self.reducer.end()
        self.pool.clear()
        self.buffers.stale = sync
        self._release_idle()

    # Values ---------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(
        self, what: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, gradients: bool = False
    ) -> Iterator[None]:
        """Full parameter values while the block runs, to read and to write; collective.

        Inside a training step the units stay gathered until its backward is over, so that losses may be
        computed from them. Outside, values are the masters that the optimizer updates; what is written is taken
        over on exit, each rank contributing the range that it owns. With `gradients`, ``p.grad`` is full as well.

        Args:
            what: a module, a parameter or several; everything in the same units comes along.

        Raises:
            ConfigurationError: something in `what` is not a parameter of the sharded module.
        """
        self._insist_on_module()
        units = self._units_of(what)
        if self.in_step is not None and not gradients:
            with gathered_within_step(self, units):
                yield
            return
        self.mesh.rollcall.call(Place.GATHERED, sum(31**i * (u.index + 1) for i, u in enumerate(units)) % 2**40)
        with gathered_outside_step(units, gradients=gradients, meet=lambda: self.mesh.rollcall.call(Place.GATHERED)):
            yield

    def _units_of(self, what: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> list[Unit]:
        if isinstance(what, nn.Module):
            parameters = list(what.parameters())
        else:
            parameters = [what] if isinstance(what, nn.Parameter) else list(what)
        unknown = [p for p in parameters if p not in self.slots]
        if unknown:
            raise ConfigurationError(
                f"gathered() got {len(unknown)} parameters that do not belong to the sharded module, "
                f"the first of shape {tuple(unknown[0].shape)}"
            )
        groups = {self.slots[p].group for p in parameters}
        return [unit for unit in self.units if not groups.isdisjoint(unit.groups)]

    def touch(self, parameter: nn.Parameter) -> None:
        """Serve a read of a released parameter: inside a step by gathering its unit, elsewhere by an error."""
        slot = self.slots[parameter]
        unit = next(unit for unit in self.units if slot.group in unit.groups)
        if unit.residency is Residency.GATHERED:
            return
        if self.in_step is None:
            raise ReleasedParameterError(
                f"{slot.name} was read or written outside a step, but its values rest sharded over "
                f"{self.mesh.dp.size} ranks. Wrap the code in `with trainer.strategy.gathered(module):` "
                "(engine.gathered in a plain loop), called on all ranks; for checkpoints call "
                "trainer.save_checkpoint, for whole weights strategy.full_state_dict()"
            )
        if unit.name not in self._warned and unit.name != ROOT:
            self._warned.add(unit.name)
            warnings.warn(
                f"{slot.name} is read outside the forward of {unit.name}; the unit "
                f"({unit.num_bytes / 1e6:.1f} MB) is gathered for it and stays until the backward of this step is over",
                stacklevel=4,
            )
        self.hold(unit)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While the block runs, ``parameter.copy_(whole values)`` writes this rank's part of the masters.

        `nn.Module.load_state_dict` copies just so, with its hooks and checks. Local until the end of the block, which
        is collective.
        """
        self.notice_writes()
        for slot in self.slots.values():
            slot.parameter.__class__ = guard.ReleasedParameter
        self._loading = True
        try:
            yield
        finally:
            self._loading = False
            for slot in self.slots.values():
                if slot.group.residency is Residency.GATHERED:
                    slot.parameter.__class__ = own_class(slot.parameter)
            self.refresh(self.groups)

    def load(self, parameter: nn.Parameter, values: Tensor) -> bool:
        """See `loading`."""
        if self._loading:
            slot = self.slots[parameter]
            slot.group.load(slot, values)
        return self._loading

    def pieces(self) -> list[Piece]:
        """Every parameter as this rank holds it, in the order of the module's units."""
        return [Piece(slot.group.spec(slot), slot) for group in self.groups for slot in group.slots]

    def refresh(self, groups: Iterable[FlatGroup]) -> None:
        """Bring resident computing copies up to date with the masters; collective where masters are sharded."""
        if self.row.parameter is Placement.REPLICATE and self.row.optimizer is Placement.SHARD:
            self.mesh.rollcall.call(Place.REFRESH)
        under_way: deque[Pending] = deque()
        for group in groups:
            under_way.append(group.start_refresh())
            if len(under_way) > MAX_IN_FLIGHT:  # what is under way lies in memory twice
                under_way.popleft().wait()
        for pending in under_way:
            pending.wait()

    # Optimizers -----------------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        """Let `optimizer`, built on the module's parameters, update this rank's fragments in their place.

        Its group dicts stay the same objects, so schedulers keep working; state made in the constructor moves along.
        May be called again after parameters were added to it.

        Raises:
            UnsupportedOptimizerError: its update is not elementwise.
            ConfigurationError: it holds a parameter that the module does not have.
        """
        self._insist_on_module()
        held = [p for g in optimizer.param_groups for p in g["params"]]
        foreign = [p for p in held if p not in self.slots]
        if foreign:
            raise ConfigurationError(
                f"{type(optimizer).__name__} holds {len(foreign)} parameters that are not in the module, the first of "
                f"shape {tuple(foreign[0].shape)}: register them as attributes of the module"
            )
        if self._needs_exchange(held):
            if self.row.optimizer is Placement.SHARD or any(self.slots[p].cut is not None for p in held):
                self.state_bytes_per_element = max(
                    self.state_bytes_per_element, probe(optimizer).state_bytes_per_element
                )
            for param_group in optimizer.param_groups:
                param_group["params"] = [self._exchange(optimizer, p) for p in param_group["params"]]
        if not any(getattr(hook, "__self__", None) is self for hook in optimizer._optimizer_step_post_hooks.values()):
            optimizer.register_step_pre_hook(self._stepping)
            optimizer.register_step_post_hook(self._stepped)
            optimizer.zero_grad = _ZeroGrad(self, optimizer)  # type: ignore[method-assign]

    def _exchange(self, optimizer: Optimizer, parameter: nn.Parameter) -> nn.Parameter:
        slot = self.slots[parameter]
        if slot.fragment is parameter:
            return parameter
        state = optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[slot.fragment] = {k: shard_state(v, slot) for k, v in state.items()}
        return slot.fragment

    def _needs_exchange(self, parameters: Iterable[nn.Parameter]) -> bool:
        return any(self.slots[p].fragment is not p for p in parameters if p in self.slots)

    def needs_adoption(self, optimizer: Optimizer) -> bool:
        """Whether parameters of the module were added to it since it was adopted."""
        held = [p for g in optimizer.param_groups for p in g["params"]]
        return self._needs_exchange(held) or any(p not in self.slots for p in held)

    def _stepping(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What user code wrote into parameters goes to the masters before they are updated: after the closure."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.notice_writes()
            return args, kwargs

        def noticing() -> Any:
            result = closure()
            self.notice_writes()
            return result

        if len(args) > 1:
            return (args[0], noticing, *args[2:]), kwargs
        return args, {**kwargs, "closure": noticing}

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        updated = {id(p) for g in optimizer.param_groups for p in g["params"]}
        for group in self.groups:
            group.stale |= any(id(slot.fragment) in updated for slot in group.slots)
        self._release_idle()
        for unit in self._held:  # gathered before this update, and perhaps part of a graph that is still needed
            self.gatherer.gather_anew(unit)
        self.refresh(g for g in self.groups if any(id(slot.fragment) in updated for slot in g.slots))


class _InsistOnAdoption:
    """Looks at every optimizer before its step: on sharded parameters it would find no gradients, and decay weights.

    torch walks its list of such hooks while a collection may free an engine, so a hook that outlives its engine stays,
    does nothing, and is removed when the next one is registered.
    """

    @classmethod
    def register(cls, engine: ZeroEngine) -> RemovableHandle:
        """One for this engine, in the place of those whose engines are gone."""
        hooks = optimizer_hooks._global_optimizer_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, cls) and hook.engine() is None]:
            del hooks[key]
        return optimizer_hooks.register_optimizer_step_pre_hook(cls(weakref.ref(engine)))

    def __init__(self, engine: "weakref.ref[ZeroEngine]") -> None:
        self.engine = engine

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        engine = self.engine()
        if engine is not None and engine._needs_exchange(p for g in optimizer.param_groups for p in g["params"]):
            raise LightningDistError(
                f"{type(optimizer).__name__} holds parameters that are sharded, but was not adopted before its step: "
                "call engine.adopt(optimizer), or under the Trainer return it from configure_optimizers. To train the "
                "module under a strategy of another package, give that a copy: copy.deepcopy(module) inside `with "
                "strategy.gathered(module):`, or load strategy.full_state_dict()"
            )


class _ZeroGrad:
    """``optimizer.zero_grad`` that also frees the buffers behind gradients which it has set to None."""

    def __init__(self, engine: ZeroEngine, optimizer: Optimizer) -> None:
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
