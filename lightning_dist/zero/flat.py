"""A flat group: parameters of one unit, back to back in one buffer, split evenly over the ranks.

::

    parameters     |  weight  | weight | bias |pad|          compute: what forward and backward use
    flat buffer    [=================================]       (views of it are the parameters' values)
    chunk of rank  [   0    |    1    |   2   |   3  ]       owned:   what this rank's optimizer updates

The even split ignores where one parameter ends and the next begins, so one all-gather fills the buffer with no
copy afterwards, one reduce-scatter empties the gradient, and padding exists only at the tail (N - 1 elements at
most). Autograd saves views of the buffer (a linear saves ``weight.t()``); releasing therefore shrinks the
buffer's *storage* to 0 bytes and gathering grows it back: views taken earlier stay right.

The placements of the ZeRO table decide what rests: parameters REPLICATE keep `compute` resident; optimizer SHARD makes
`owned` this rank's chunk; where the compute dtype differs from the master dtype, or parameters are sharded, `owned` is
storage of its own, else it is a view of `compute`.

Where a pipeline has put the parameters on other ranks, the group is *away*: it has no elements here, its fragments are
empty, and whoever collects whole values hears them from the parameters' home.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from lightning_dist.comm.collectives import Pending
from lightning_dist.comm.mesh import Axis
from lightning_dist.core.shard import Home, ShardSpec, overlap, shard_size
from lightning_dist.core.stages import Placement, StageRow
from lightning_dist.params.fragment import Fragment
from lightning_dist.params.questions import shape_of_piece, without_answers
from lightning_dist.zero import guard
from lightning_dist.zero.pool import BufferPool
from lightning_dist.zero.slot import Residency, Slot, take_over_assignment
from lightning_dist.zero.units import NamedParameter


class FlatGroup:
    """See the module docstring. `owned` and the fragments exist all the time; `compute` comes and goes in stage 3."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        *,
        row: StageRow,
        axis: Axis,
        peers: Axis,
        stages: Axis,
        home: Home | None,
        compute_dtype: torch.dtype | None,
        device: torch.device,
        pool: BufferPool,
    ) -> None:
        self.row, self.axis, self.peers, self.stages, self.home, self.pool = row, axis, peers, stages, home, pool
        self.here = home is None or home.here
        first = parameters[0].parameter
        self.master_dtype = first.dtype
        self.compute_dtype = compute_dtype if compute_dtype is not None else first.dtype
        self.device = device  # parameters may still be on the CPU: they move group by group
        self.slots = self._place(parameters)
        self.numel = self.slots[-1].stop
        self.chunk = shard_size(self.numel, axis.size)
        self.padded = self.chunk * axis.size
        self.sharded_state = row.optimizer is Placement.SHARD
        self.low, self.high = self.range_of(axis.rank)
        self.compute = torch.zeros(self.padded, dtype=self.compute_dtype, device=self.device)
        self.views = [self.compute[s.start : s.stop].view(s.shape) for s in self.slots] if self.here else []
        self.residency = Residency.GATHERED
        self.pending = Pending()
        self.stale = False  # masters have changed since the computing copy was filled from them
        self.owned = self._take_over()
        self._make_fragments()
        if row.parameter is Placement.SHARD:
            self.release()
        self.gradient: Tensor | None = None  # local, whole: packed as it arrives
        self.reduced: Tensor | None = None  # the owned range, averaged over the ranks

    def _place(self, parameters: Sequence[NamedParameter]) -> list[Slot]:
        """Odd-sized parameters go last, so that the others start at aligned addresses."""
        slots: list[Slot] = []
        start = 0
        for item in sorted(parameters, key=lambda item: shape_of_piece(item.parameter).numel() % 16 != 0):
            shape = shape_of_piece(item.parameter)
            stop = start + (shape.numel() if self.here else 0)
            slots.append(Slot(item.names, item.parameter, shape, start, stop, self))
            start = stop
        return slots

    def range_of(self, rank: int) -> tuple[int, int]:
        """The flat range whose optimizer state a rank keeps."""
        return (rank * self.chunk, (rank + 1) * self.chunk) if self.sharded_state else (0, self.padded)

    def _take_over(self) -> Tensor:
        """Copy rank 0's values into the buffer, make the parameters views of it, and return the owned range."""
        if not self.here:
            for slot in self.slots:
                slot.stand_in = guard.released_values(slot.parameter)
                guard.show(slot.parameter, slot.stand_in)
            return self.compute.to(self.master_dtype)
        start = torch.zeros(self.padded, dtype=self.master_dtype, device=self.device)
        for slot in self.slots:
            start[slot.start : slot.stop].copy_(without_answers(slot.parameter).detach().reshape(-1))
        self.axis.broadcast(start, purpose="setup")
        self.compute.copy_(start)
        for slot, view in zip(self.slots, self.views, strict=True):
            guard.show(slot.parameter, view)
            slot.stand_in = guard.released_values(slot.parameter)
        if self.row.parameter is Placement.SHARD or self.compute_dtype != self.master_dtype:
            return start[self.low : self.high].clone()
        return self.compute[self.low : self.high]

    def _make_fragments(self) -> None:
        same = self.here and not self.sharded_state and self.compute_dtype == self.master_dtype
        same = same and all(slot.cut is None for slot in self.slots)
        for slot in self.slots:
            if same:
                slot.fragment = slot.parameter
                continue
            piece = self.piece(self.owned, slot)
            if self.here and not self.sharded_state:
                piece = piece.view(slot.shape)
            partial = slot.cut is not None or piece.numel() < slot.shape.numel()
            slot.fragment = Fragment(piece, slot.parameter, partial=partial and self.here)

    def piece(self, owned: Tensor, slot: Slot) -> Tensor:
        """The part of a slot inside a tensor that covers the owned range; empty if there is none."""
        low, high = overlap(self.low, self.high, slot.start, slot.stop)
        return owned[low:high]

    def spec(self, slot: Slot, rank: int | None = None) -> ShardSpec:
        """How the fragment of a slot on `rank` (default: this one) sits in the global parameter."""
        low, high = (self.low, self.high) if rank is None else self.range_of(rank)
        start, stop = overlap(slot.start, slot.stop, low, high)
        copies = (1 if self.sharded_state else self.axis.size) * (self.peers.size if slot.cut is None else 1)
        copies *= self.stages.size if self.home is None else len(self.home.ranks)
        return ShardSpec(slot.name, tuple(slot.shape), start, stop, copies, slot.cut)

    # Values ---------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of the computing copy when it is gathered."""
        return self.padded * self.compute.element_size()

    def start_gather(self, *, purpose: str = "parameters") -> None:
        """Begin to fill the buffer with all ranks' owned ranges; collective."""
        if not self.here:
            self.residency = Residency.GATHERING  # as where it lives: all ranks must ask for the same units
            return
        self.finish_gather()  # of an earlier request, if one is under way
        if self.residency is Residency.RELEASED and self.compute.untyped_storage().nbytes() < self.num_bytes:
            self.compute.untyped_storage().resize_(self.num_bytes)
        self._own_chunk().copy_(self.owned)
        self._masters_agree()
        self.pending = self.axis.all_gather(self.compute, purpose=purpose)
        self.residency = Residency.GATHERING

    def _own_chunk(self) -> Tensor:
        return self.compute[self.low : self.high]

    def finish_gather(self) -> None:
        """Wait for the values and show them in the parameters."""
        if self.residency is not Residency.GATHERING:
            return
        self.residency = Residency.GATHERED
        if not self.here:
            return
        self.pending.wait()
        for slot, view in zip(self.slots, self.views, strict=True):
            guard.show(slot.parameter, view)

    def release(self) -> None:
        """Free the computing copy; the parameters keep their metadata."""
        if self.residency is Residency.GATHERING:
            self.finish_gather()
        if not self.here and self.row.parameter is Placement.SHARD:
            self.residency = Residency.RELEASED
        if self.residency is Residency.RELEASED or not self.here:
            return
        self.notice_writes()
        for slot in self.slots:
            guard.hide(slot.parameter, slot.stand_in)
        self.drop_computing_copy()

    def forget_step(self) -> None:
        """Drop a gather that was under way, and gradients; the ranks have met anew, see `Mesh.recover`."""
        self.pending = Pending()
        if self.residency is Residency.GATHERING and self.here:
            for slot in self.slots:
                guard.hide(slot.parameter, slot.stand_in)
            self.drop_computing_copy()
        elif self.residency is Residency.GATHERING:
            self.residency = Residency.RELEASED
        for slot in self.slots:
            slot.fragment.grad = slot.parameter.grad = None
        self.forget_zeroed()

    def drop_computing_copy(self) -> None:
        """Free its storage; the parameters must have been hidden."""
        storage = self.compute.untyped_storage()
        if storage.resizable():  # not where user code has made a NumPy array of a parameter, which lies in it
            storage.resize_(0)
        self.residency = Residency.RELEASED

    def notice_writes(self) -> None:
        """Take over what user code wrote into parameters that are shown; local.

        ``p.data = values`` leaves the buffer and is brought back into it; writes in place are compared, since those
        through ``p.data`` leave no trace, where that costs little (the owned part, and only if masters are kept apart).

        Raises:
            LightningDistError: new data of another shape or dtype.
        """
        if self.residency is not Residency.GATHERED or not self.here:
            return
        for slot, view in zip(self.slots, self.views, strict=True):
            take_over_assignment(slot, view, (self.master_dtype, self.compute_dtype))
        self.take_over_changes()

    def take_over_changes(self) -> None:
        """Masters follow the computing copy where it was written: elsewhere it is but a rounded image of them."""
        seen = self.compute[self.low : self.high]
        if self.stale or self.masters_written() or self.shards_written() or self.owned.data_ptr() == seen.data_ptr():
            return
        with torch.no_grad():
            image = self.owned.to(seen.dtype)
            if seen.device.type == "cpu" and torch.equal(image, seen):  # elsewhere this would wait for the device
                return
            self.owned.copy_(torch.where(image != seen, seen.to(self.owned.dtype), self.owned))

    def _masters_agree(self) -> None:
        self.stale = False
        for slot in self.slots:
            slot.master_version = slot.fragment._version

    def masters_written(self) -> bool:
        """Whether fragments were written in place, by other code than the optimizer; what is shown is then stale."""
        if self.row.parameter is Placement.SHARD or self.slots[0].fragment is self.slots[0].parameter or not self.here:
            return False
        return any(slot.fragment._version != slot.master_version for slot in self.slots)

    def shards_written(self) -> bool:
        """As `masters_written`, of a group that is gathered now."""
        if self.row.parameter is not Placement.SHARD or not self.here:
            return False
        return any(slot.fragment._version != slot.master_version for slot in self.slots)

    def start_refresh(self) -> Pending:
        """Bring a resident computing copy up to date after the owned range has changed; collective if sharded."""
        if self.row.parameter is Placement.SHARD or not self.here:
            return Pending()
        chunk = self._own_chunk()
        if chunk.data_ptr() != self.owned.data_ptr():
            chunk.copy_(self.owned)
        self._masters_agree()
        return self.axis.all_gather(self.compute, purpose="parameters") if self.sharded_state else Pending()

    def load(self, slot: Slot, values: Tensor) -> None:
        """Put this rank's part of whole new values into the owned range; local."""
        spec = self.spec(slot)
        if tuple(values.shape) != spec.global_shape and values.numel() != prod(spec.global_shape):
            raise ValueError(f"{slot.name} has shape {spec.global_shape}, the new values have {tuple(values.shape)}")
        if not self.here:
            return
        with torch.no_grad():
            values = slot.part_of(values.detach().reshape(spec.global_shape))
            self.piece(self.owned, slot).copy_(values.reshape(-1)[spec.start : spec.stop])
        self.stale = True

    # Gradients ------------------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Whether any parameter asks for a gradient now (this can change: freezing, toggled optimizers)."""
        return any(slot.parameter.requires_grad for slot in self.slots)

    def wire_dtype(self, *, accumulates: bool) -> torch.dtype:
        """Gradients travel as they were computed if the sum is made in the master dtype anyway, else in that."""
        exact = self.sharded_state and self.axis.sums_in_output_dtype and not accumulates
        return self.compute_dtype if exact else self.master_dtype

    def pack(self, slot: Slot, gradient: Tensor, *, accumulates: bool) -> None:
        """Put a fresh gradient into the group's local gradient, or add it to what lies there."""
        if self.gradient is None:
            dtype = self.wire_dtype(accumulates=accumulates)
            if self._can_adopt(gradient, dtype):
                self.gradient = gradient.view(-1)
                slot.arrived = True
                return
            self.gradient = self.pool.take(self.padded, dtype)
        place = self.gradient[slot.start : slot.stop]
        if place.data_ptr() == gradient.data_ptr():
            pass  # autograd has accumulated in place
        elif slot.arrived:
            place.add_(gradient.reshape(-1))
        else:
            place.copy_(gradient.reshape(-1))
        slot.arrived = True

    def _can_adopt(self, gradient: Tensor, dtype: torch.dtype) -> bool:
        """A single parameter without padding needs no packing: its gradient is the flat gradient."""
        return (
            len(self.slots) == 1 and self.padded == self.numel and gradient.dtype == dtype and gradient.is_contiguous()
        )

    def start_reduce(self) -> Pending:
        """Average the local gradient over the ranks; collective. The result lies in `reduced` once waited for.

        Parameters that got no gradient here count as zeros: ranks may differ in which these are.
        """
        if not self.here:
            self.reduced = self.owned.new_empty(0)
            return Pending()
        if self.gradient is None:
            self.gradient = self.pool.take(self.padded, self.wire_dtype(accumulates=False)).zero_()
        flat = self.gradient
        for slot in self.slots:
            if not slot.arrived:
                flat[slot.start : slot.stop].zero_()
        flat[self.numel :].zero_()
        if not self.sharded_state:
            self.reduced = flat
            return self.axis.all_reduce_mean(flat, purpose="gradients")
        return self._start_scatter(flat)

    def _start_scatter(self, flat: Tensor) -> Pending:
        if self.reduced is None:
            self.reduced = torch.zeros(self.chunk, dtype=self.master_dtype, device=self.device)
        add = any(slot.summed for slot in self.slots)
        if add:
            for slot in self.slots:
                if not slot.summed:
                    self.piece(self.reduced, slot).zero_()
        pending = self.axis.reduce_scatter_mean(flat, self.reduced, purpose="gradients", add=add)
        self.gradient = None

        def finish() -> None:
            pending.wait()
            self.pool.give(flat)

        return Pending((), finish)

    def deliver(self, slot: Slot, *, reduced: bool) -> None:
        """Show a gradient to the optimizer (its fragment's `grad`) and to the user (a stand-in, the truth in stage 0).

        An unreduced gradient is delivered too: what the optimizer then sets to None is known to be zeroed.
        """
        source = self.reduced if reduced else self.gradient
        if not self.here:
            slot.fragment.grad = torch.zeros_like(slot.fragment)
            slot.arrived, slot.summed = not reduced, reduced or slot.summed
        elif self.sharded_state:
            assert source is not None
            piece = self.piece(source if reduced else source[self.low : self.high], slot)
            slot.fragment.grad = piece if piece.dtype == slot.fragment.dtype else piece.to(slot.fragment.dtype)
            slot.arrived, slot.summed = not reduced, reduced or slot.summed
        else:
            assert source is not None
            slot.fragment.grad = source[slot.start : slot.stop].view(slot.shape)
            slot.arrived = True
        if slot.fragment is not slot.parameter:
            slot.parameter.grad = guard.sharded_gradient(slot.parameter)
        slot.held = True

    def drop(self, slot: Slot) -> None:
        """Forget a gradient, as ``parameter.grad = None`` does."""
        slot.held = slot.arrived = slot.summed = False
        slot.fragment.grad = slot.parameter.grad = None

    def forget_zeroed(self) -> None:
        """Notice gradients that the user or an optimizer set to None since they were delivered."""
        for slot in self.slots:
            if not slot.held:  # what arrived in a backward that failed was never delivered
                slot.arrived = slot.summed = False
            elif slot.fragment.grad is None or slot.parameter.grad is None:
                self.drop(slot)
        if any(slot.held for slot in self.slots):
            return
        self.reduced = None
        if self.gradient is not None:
            # In stage 0 user code may still hold what was `p.grad`, a view of the buffer: it must not be lent again.
            (self.pool.give if self.sharded_state else self.pool.forget)(self.gradient)
            self.gradient = None

    def local_bytes(self) -> dict[str, int]:
        """Bytes that this rank keeps for the group: parameters and gradients as they rest."""
        resident = self.compute.untyped_storage().nbytes()
        own_storage = self.owned.untyped_storage().data_ptr() != self.compute.untyped_storage().data_ptr()
        gradient = 0 if self.gradient is None else self.gradient.numel() * self.gradient.element_size()
        reduced = 0 if self.reduced is None else self.reduced.numel() * self.reduced.element_size()
        if self.reduced is self.gradient:
            reduced = 0
        owned = self.owned.numel() * self.owned.element_size() if own_storage else 0
        master = owned if self.row.parameter is not Placement.SHARD else 0
        return {
            "parameters": resident + owned - master,
            "master": master,
            "gradients": gradient + reduced,
        }
