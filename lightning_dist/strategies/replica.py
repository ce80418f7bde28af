"""Strategies whose replicas are computed by several ranks together: what these ranks share, and make sure to agree on.

The ranks of a replica sit at one place of the data-parallel axis, whichever the other axes are (`Layout.replicas`).
They work on the same batch, and whatever they hold or draw in common must be the same on all of them::

    rank of a replica   reads the same samples          `distributed_sampler_kwargs`; the first batches are compared
                        continues one random stream     shared at setup
                        counts once                     `reduce`, `all_gather` and metrics go over the replicas
                        holds equal copies              `check_replicas`
"""

import zlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_dist.comm import Place
from lightning_dist.comm.world import is_world
from lightning_dist.core.errors import ConfigurationError, RankMismatchError
from lightning_dist.core.layout import AXES
from lightning_dist.core.stages import Placement
from lightning_dist.engine import Parallel
from lightning_dist.strategies.arguments import insist
from lightning_dist.strategies.metrics import count_ranks, count_replicas_once
from lightning_dist.strategies.sharded import Loop, ShardedStrategy
from lightning_dist.strategies.whole import remember
from lightning_dist.zero.slot import Slot

BATCHES_COMPARED = 3
"""Batches per run of a loop whose contents the ranks of a replica compare."""


class ReplicaStrategy(ShardedStrategy):
    """See the module docstring. A subclass says in its `_plan` how a replica's ranks divide the module.

    Args:
        check_replicas_every: every so many optimizer steps, insist that parameters which ranks of a replica hold in
            common are equal to the bit; 0 never looks.
        **kwargs: see `ShardedStrategy`.
    """

    def __init__(self, *, check_replicas_every: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        insist(check_replicas_every=check_replicas_every)
        self.check_replicas_every = check_replicas_every
        self._compared: dict[str, int] = {}
        self._steps = 0
        self._parted = False

    # Setup ----------------------------------------------------------------------------------------------------

    @override
    def _parallelize(self, module: "pl.LightningModule") -> Parallel:
        parallel = super()._parallelize(module)
        count_replicas_once(module, self.mesh)
        remember(module, count_ranks)
        return parallel

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        self._compared.clear()
        self._share_random_stream()

    @property
    @override
    def divides_parameters(self) -> bool:
        """Whether a replica is more than one rank."""
        return self.mesh.layout.dp < self.mesh.layout.world_size

    def _share_random_stream(self) -> None:
        """Dropout on what ranks hold in common must mask alike: they continue the stream of their replica's first."""
        if not self.divides_parameters:
            return
        device = self.root_device
        state = torch.random.get_rng_state().to(device)
        own = torch.cuda.get_rng_state(device).to(device) if device.type == "cuda" else None
        for axis in (self.mesh.axes[name] for name in AXES if name != "dp"):
            axis.broadcast(state, purpose="setup")
            if own is not None:
                axis.broadcast(own, purpose="setup")
        torch.random.set_rng_state(state.cpu())
        if own is not None:
            torch.cuda.set_rng_state(own.cpu(), device)

    def _agree_on_random_stream(self) -> None:
        """Code that draws on some ranks only (a callback behind ``if rank == 0:``) must not part what they share."""
        if not self.divides_parameters:
            return
        states = [torch.random.get_rng_state()]
        if self.root_device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.root_device))
        digest = 0
        for state in states:
            digest = zlib.crc32(state.numpy().data, digest)
        said = self.mesh.rollcall.ask(Place.AGREE, digest, what="on their random numbers")
        if all(len({said[rank] for rank in ranks}) == 1 for ranks in self.mesh.layout.replicas()):
            return
        self._share_random_stream()
        if not self._parted:
            self._parted = True
            rank_zero_warn(
                "since the last step only some ranks of a replica have drawn random numbers (in a callback, or behind "
                "`if rank == 0:`). Dropout on what they hold in common must mask alike, so they go on with the numbers "
                "of the first of them: the run is right, but not the one that it would have been without that draw"
            )

    # Batches --------------------------------------------------------------------------------------------------

    @override
    def _step(self, loop: Loop, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._compare(loop, (args, kwargs))
        self._agree_on_random_stream()
        return super()._step(loop, run, args, kwargs)

    def _compare(self, loop: Loop, batch: Any) -> None:
        """Ranks of a replica must see the same batch; the first ones of every loop are compared."""
        if not self.divides_parameters or self._compared.setdefault(loop, 0) >= BATCHES_COMPARED:
            return
        self._compared[loop] += 1
        said = self.mesh.rollcall.ask(Place.AGREE, _digest(batch), what="on a batch")
        replicas = self.mesh.layout.replicas()
        if all(len({said[rank] for rank in ranks}) == 1 for ranks in replicas):
            return
        mine = replicas[self.mesh.dp.rank]
        others = "" if len({said[rank] for rank in mine}) > 1 else ", which agree; others do not"
        raise RankMismatchError(
            f"the ranks of a replica ({', '.join(map(str, mine))} here{others}) got different batches in {loop}: they "
            "compute it together and need the same samples and the same augmentation. Give the dataloader of this loop "
            "a sampler with trainer.strategy.distributed_sampler_kwargs, or let Lightning do it "
            "(use_distributed_sampler=True), and seed random transforms alike (seed_everything(..., workers=True))"
        )

    # Numbers --------------------------------------------------------------------------------------------------

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Over the replicas: the ranks of one have the same values."""
        replicas = self.mesh.dp
        everyone = group is None or is_world(group)  # which is what Lightning's module passes
        if everyone and replicas.size == 1:
            self.mesh.rollcall.call(Place.METRIC, self._progress(), what="by all_gather")
            return tensor.unsqueeze(0)
        return super().all_gather(tensor, replicas.groups["gather"] if everyone else group, sync_grads)

    # Copies ---------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        self._steps += 1
        if self.check_replicas_every and self._steps % self.check_replicas_every == 0:
            self.check_replicas()
        return result

    def check_replicas(self) -> None:
        """Insist that parameters which ranks of a replica hold in common are equal to the bit. All ranks call it.

        Raises:
            RankMismatchError: naming the first parameter that differs.
        """
        sharded = self.engine.row.parameter is Placement.SHARD
        held = {_identity(slot, sharded=sharded): slot for slot in self.engine.slots.values() if slot.group.here}
        rollcall, replicas = self.mesh.rollcall, self.mesh.layout.replicas()
        rollcall.call(Place.AGREE, what="on parameters that they hold in common")
        names: list[Any] = rollcall.exchange(list(held))
        elsewhere = {name for rank in replicas[self.mesh.dp.rank] if rank != self.mesh.rank for name in names[rank]}
        said: list[Any] = rollcall.exchange(
            {name: _crc(self._resting(slot)) for name, slot in held.items() if name in elsewhere}
        )
        for ranks in replicas:
            for name in dict.fromkeys(name for rank in ranks for name in said[rank]):
                holders = [rank for rank in ranks if name in said[rank]]
                if len({said[rank][name] for rank in holders}) > 1:
                    raise RankMismatchError(
                        f"{name} is held in common by ranks {holders} of a replica, but is no longer equal there "
                        f"(after {self._steps} optimizer steps): its gradients differed. Does the module draw random "
                        "numbers, read the rank, or depend on anything else that differs between these ranks?"
                    )

    def _resting(self, slot: Slot) -> Tensor:
        """What this rank holds of a parameter between steps: of a sharded one its range, as the rest of a replica."""
        sharded = self.engine.row.parameter is Placement.SHARD
        return slot.group.piece(slot.group.owned, slot) if sharded else slot.parameter


def number_of_replicas(name: str, size: int, world: int) -> int:
    """How many replicas of `size` ranks fill the world.

    Raises:
        ConfigurationError: they leave ranks over; the message names the argument `name` and sizes that work.
    """
    if world % size:
        works = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise ConfigurationError(f"{name}={size} does not divide the {world} ranks of this run; use {name}={works}")
    return world // size


def _identity(slot: Slot, *, sharded: bool) -> str:
    """The same on all ranks that hold the same values.

    Ranges of a sharded parameter need not be the same on tensor-parallel peers, where other parameters of the unit are
    cut unevenly; what only overlaps is not compared.
    """
    name = slot.name if slot.cut is None else f"part {slot.cut.rank} of {slot.name}"
    spec = slot.group.spec(slot)
    return f"elements {spec.start} to {spec.stop} of {name}" if sharded else name


def _digest(batch: Any) -> int:
    """A number that almost surely differs between different batches."""
    digest = 0
    for leaf in pytree.tree_leaves(batch):
        text = leaf if isinstance(leaf, (str, int, float, bool)) else None
        digest = _crc(leaf, digest) if isinstance(leaf, Tensor) else zlib.crc32(repr(text).encode(), digest)
    return digest


def _crc(tensor: Tensor, start: int = 0) -> int:
    """Of the values, shape and dtype."""
    head = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), start)
    if not tensor.numel() or tensor.is_sparse or tensor.is_quantized:
        return head
    return zlib.crc32(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes(), head)
