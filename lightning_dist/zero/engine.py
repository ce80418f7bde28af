"""The ZeRO engine: data parallelism without redundant copies, around a module that knows nothing of it.

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054). The engine takes over the parameters of a module in place, unit
by unit (`units`, `flat`), gathers them when their forward or backward needs them (`gather`), reduces gradients
while backward runs (`reduce`), and lets the user's own optimizer update flat fragments (`adoption`). The stage decides
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.comm.collectives import Pending
from lightning_dist.comm.mesh import Mesh
from lightning_dist.comm.rollcall import Place
from lightning_dist.core.errors import ConfigurationError, LightningDistError, ReleasedParameterError
from lightning_dist.core.stages import Placement, stage_row
from lightning_dist.zero import copies, guard
from lightning_dist.zero.adoption import Adoption, InsistOnAdoption
from lightning_dist.zero.aside import Aside
from lightning_dist.zero.buffers import BufferSync, HomeBuffers
from lightning_dist.zero.flat import FlatGroup
from lightning_dist.zero.gather import Gatherer, Unit, make_units
from lightning_dist.zero.gathered import gathered
from lightning_dist.zero.hooks import UnitHooks
from lightning_dist.zero.loading import Loading
from lightning_dist.zero.pool import BufferPool
from lightning_dist.zero.reduce import MAX_IN_FLIGHT, Reducer
from lightning_dist.zero.refusals import insist_on_equal_modules, refuse_unsupported
from lightning_dist.zero.slot import Piece, Residency, Slot
from lightning_dist.zero.units import ROOT

Accumulate = Literal["shard", "local"]
StepKind = Literal["train", "eval"]


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
        self.units = make_units(module, mesh, self.row, compute_dtype=compute_dtype, pool=self.pool)
        self._unit_of = {group: unit for unit in self.units for group in unit.groups}
        self.groups = list(self._unit_of)
        self.slots = {slot.parameter: slot for group in self.groups for slot in group.slots}
        largest = max((unit.num_bytes for unit in self.units), default=0)
        self.prefetch_bytes = largest if prefetch_bytes is None else prefetch_bytes
        self.gatherer = Gatherer(self.units, mesh.rollcall, prefetch_bytes=self.prefetch_bytes)
        self.reducer = Reducer(self.groups, mesh.rollcall)
        self.buffers = BufferSync(module, mesh)
        self.home_buffers = HomeBuffers(mesh.pp, mesh.rollcall, mesh.device)
        self.aside = Aside(self)
        self.adoption = Adoption(self)
        self.in_step: StepKind | None = None
        self.writes_may_follow = False  # into fragments, before another forward of the same step
        self._held: list[Unit] = []
        self._loading = Loading(self)
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

    def _install(self) -> None:
        for unit in self.units:
            for caller in unit.callers:
                self._handles += self._hooks.install(caller, unit)
        in_root = {slot.parameter for unit in self.units if unit.name == ROOT for g in unit.groups for slot in g.slots}
        for part in self.module.modules():
            if not in_root.isdisjoint(part.parameters(recurse=False)):
                self._handles.append(self._hooks.install_for_writes(part))
        for slot in self.slots.values():
            guard.own(slot.parameter, self)
            self._handles.append(self._hooks.watch(slot))
        copies.install(self.module)
        self._handles.append(InsistOnAdoption.register(self.adoption))

    def unit_of(self, slot: Slot) -> Unit:
        """The unit that a parameter is gathered with."""
        return self._unit_of[slot.group]

    def forget_calls(self) -> None:
        """Backward has passed every call of the units that there was."""
        self._hooks.backward_over()

    def gradient_arrived(self, slot: Slot) -> None:
        """A parameter has got its gradient, from autograd or from `aside`."""
        if self.reducer.take(slot):
            self._hooks.gradients_complete(self.unit_of(slot), slot.group)

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
        self.show_writes()
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

    def show_writes(self) -> None:
        """What user code wrote into fragments (what an optimizer's groups hold) is shown; collective if it wrote."""
        self.writes_may_follow = False
        written = [group for group in self.groups if group.masters_written()]
        if written:
            self.refresh(written)
        for unit in self.units:
            if unit.residency is not Residency.RELEASED and any(group.shards_written() for group in unit.groups):
                self.gatherer.gather_anew(unit)

    def end_step(self) -> None:
        """Leave a step: whatever is gathered is released."""
        self.in_step = None
        self._release_all()

    def forget(self) -> None:
        """After `Mesh.recover`: nothing that a failed step has begun counts any more, its gradients among it; local."""
        self.in_step = None
        self.gatherer.in_backward = False
        self.reducer.forget()
        for unit in self.units:
            unit.calls = unit.open_calls = unit.holds = 0
        for group in self.groups:
            group.forget_step()
        self._held.clear()
        self._release_idle()
        self.pool.clear()

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

    def backward(self, loss: Tensor | None, *, sync: bool = True, run: Callable[[], object] | None = None) -> None:
        """Backward of `loss`, with its gradients averaged over the ranks on return.

        Args:
            sync: False for a micro-batch that is followed by others: stages 0 and 1, and `accumulate="local"`, then
                only sum locally.
            run: how to run backward, whatever the loss is; ``loss.backward()`` by default.
        """
        self._insist_on_module()
        if self.in_step is None:
            raise LightningDistError("backward outside a step: call it inside the `with engine.step()` of its forward")
        self.reducer.begin(reducing=sync or self.shards_each_micro_batch)
        self.gatherer.in_backward = True
        try:
            if run is not None:
                run()
            else:
                assert loss is not None
                torch.autograd.backward(loss)
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
        self.writes_may_follow = True

    # Values ---------------------------------------------------------------------------------------------------

    def gathered(
        self, what: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, gradients: bool = False
    ) -> AbstractContextManager[None]:
        """Full parameter values while the block runs, to read and to write; collective.

        Inside a training step the units stay gathered until its backward is over, so that losses may be
        computed from them. Outside, values are the masters that the optimizer updates; what is written is taken
        over on exit, each rank contributing the range that it owns, and a module's buffers are the same on all ranks:
        rank 0's, and in a pipeline those of the stage that computes them. With `gradients`, ``p.grad`` is full as well.

        Args:
            what: a module, a parameter or several; everything in the same units comes along.

        Raises:
            ConfigurationError: something in `what` is not a parameter of the sharded module.
        """
        self._insist_on_module()
        return gathered(self, what, gradients=gradients)

    def touch(self, parameter: nn.Parameter) -> None:
        """Serve a read of a released parameter: inside a step by gathering its unit, elsewhere by an error."""
        slot = self.slots[parameter]
        unit = self.unit_of(slot)
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

    def loading(self) -> AbstractContextManager[None]:
        """While the block runs, ``parameter.copy_(whole values)`` writes this rank's part of the masters.

        `nn.Module.load_state_dict` copies just so, with its hooks and checks. Local until the end of the block, which
        is collective.
        """
        return self._loading.block()

    def load(self, parameter: nn.Parameter, values: Tensor) -> bool:
        """See `loading`; False outside of its block."""
        return self._loading.take(parameter, values)

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

    def updated(self, groups: Sequence[FlatGroup]) -> None:
        """An optimizer has changed the masters of these groups: what is resident follows, what is gathered goes."""
        for group in groups:
            group.stale = True
        self._release_idle()
        for unit in self._held:  # gathered before this update, and perhaps part of a graph that is still needed
            self.gatherer.gather_anew(unit)
        self.refresh(groups)

    # Optimizers -----------------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        """Let `optimizer`, built on the module's parameters, update this rank's fragments; see `Adoption.adopt`."""
        self._insist_on_module()
        self.adoption.adopt(optimizer)

    def needs_adoption(self, optimizer: Optimizer) -> bool:
        """Whether parameters of the module were added to it since it was adopted."""
        return self.adoption.needed_by(optimizer)
