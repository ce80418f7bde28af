"""`TensorParallelStrategy`: matrices cut over the devices of a node, the rest of the world data parallel.

The module is cut in place (`lightning_dist.tensor`) before the engine of `ZeROStrategy` takes its parameters over at
stage 0; from there on precision, clipping, optimizers, checkpoints and loops are the same. What is new is who shares
what: ranks of one replica (tensor-parallel peers) work on the same batch, so the sampler gets the data-parallel rank,
and the peers' batches and random streams are made sure to agree.
"""

import warnings
import zlib
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_dist.comm import Place
from lightning_dist.comm.world import is_world
from lightning_dist.core.errors import ConfigurationError, RankMismatchError
from lightning_dist.core.layout import Layout
from lightning_dist.engine import step_bytes
from lightning_dist.strategies.metrics import count_replicas_once
from lightning_dist.strategies.whole import remember
from lightning_dist.strategies.zero import ZeROStrategy
from lightning_dist.tensor import Report, cut_module
from lightning_dist.tensor.split_tensor import SplitTensor, whole

BATCHES_COMPARED = 3
"""Batches per run of a loop whose contents tensor-parallel peers compare."""


class TensorParallelStrategy(ZeROStrategy):
    """Cuts matrices over `tp` ranks that share every batch; the other ranks hold copies and average gradients.

    Args:
        tp: ranks per replica; by default all devices of a node.
        sequence_parallel: divide norms, dropout and residuals between the cut layers along the sequence, for less
            activation memory (Korthikanti et al. 2022).
        tp_plan: which modules are cut and how, as name patterns to styles (see `lightning_dist.tensor.plan`); by
            default the module's own attribute `tp_plan`, the model's own plan, or what is known of its module types.
        check_replicas_every: every so many optimizer steps, insist that parameters which peers hold in common are
            equal to the bit; 0 never looks.
        **kwargs: see `ZeROStrategy` (without `stage`).

    Raises:
        ConfigurationError: an argument that does not exist; at setup, see `lightning_dist.tensor.cut_module`.
    """

    strategy_name = "tp"

    def __init__(
        self,
        tp: int | None = None,
        *,
        sequence_parallel: bool = False,
        tp_plan: Mapping[str, str] | None = None,
        check_replicas_every: int = 0,
        **kwargs: Any,
    ) -> None:
        if "stage" in kwargs:
            raise ConfigurationError("TensorParallelStrategy takes no stage: the data-parallel ranks hold whole copies")
        super().__init__(0, **kwargs)
        if tp is not None and (type(tp) is not int or tp < 1):
            raise ConfigurationError(f"tp={tp!r} is not a number of ranks; use 1 or more")
        self.tp, self.sequence_parallel, self.tp_plan = tp, sequence_parallel, tp_plan
        self.check_replicas_every = check_replicas_every
        self._report = Report()
        self._compared: dict[str, int] = {}
        self._steps = 0

    def __repr__(self) -> str:
        """Lightning prints this when it does not know the object."""
        return super().__repr__().replace("(stage=0)", f"(tp={self.tp})")

    # Ranks ----------------------------------------------------------------------------------------------------

    @override
    def layout(self) -> Layout:
        world, tp = self.num_nodes * self.num_processes, self.tp or self.num_processes
        if world % tp:
            works = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            raise ConfigurationError(f"tp={tp} does not divide the {world} ranks of this run; use tp={works}")
        if tp > self.num_processes and self.num_nodes > 1 and self.global_rank == 0:
            warnings.warn(
                f"tp={tp} is larger than a node ({self.num_processes} devices): every layer's activations cross the "
                "link between nodes, twice forward and twice backward, which is mostly far slower than the one inside. "
                "Use tp within a node and data or pipeline parallelism between nodes",
                stacklevel=2,
            )
        return Layout(dp=world // tp, tp=tp)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Peers of a replica read the same samples."""
        layout = self.layout()
        return {"num_replicas": layout.dp, "rank": layout.coordinates(self.global_rank)["dp"]}

    # Setup ----------------------------------------------------------------------------------------------------

    @override
    def _cut(self, module: "pl.LightningModule") -> None:
        self._report = cut_module(module, self.mesh.tp, plan=self.tp_plan, sequence_parallel=self.sequence_parallel)
        remember(module, self._report)
        count_replicas_once(module, self.mesh)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        self._compared.clear()
        _share_random_stream(self)
        if self._report.whole:
            names = ", ".join(self._report.whole[:8]) + (" ..." if len(self._report.whole) > 8 else "")
            rank_zero_info(f"tp: these linears stay whole on every rank: {names}")

    @override
    def _line(self) -> str:
        engine, layout = self.engine, self.mesh.layout
        cut = sum(s.stop - s.start for s in engine.slots.values() if s.cut is not None)
        held = sum(s.stop - s.start for s in engine.slots.values())
        sequence = " with sequence parallelism" if self.sequence_parallel else ""
        return (
            f"tp{layout.tp}{sequence}, {layout.dp} replicas: per rank {held / 1e6:.2f} M parameters, of which "
            f"{cut / 1e6:.2f} M are its parts of cut matrices; gradients of the replicas: "
            f"{step_bytes(engine) / 1e6:.2f} MB per step; activations: 4 all-reduces per layer and step"
        )

    # Agreement ------------------------------------------------------------------------------------------------

    def _compare(self, loop: str, batch: Any) -> None:
        """Peers of a replica must see the same batch; the first ones of every loop are compared."""
        if self.mesh.tp.size == 1 or self._compared.setdefault(loop, 0) >= BATCHES_COMPARED:
            return
        self._compared[loop] += 1
        said = self.mesh.rollcall.ask(Place.AGREE, _digest(batch), what="on a batch")
        mine = [said[rank] for rank in self.mesh.tp.ranks]
        if any(len({said[r] for r in ranks}) > 1 for ranks in self.mesh.layout.groups("tp")):
            raise RankMismatchError(
                f"tensor-parallel peers (ranks {', '.join(map(str, self.mesh.tp.ranks))} here"
                f"{'' if len(set(mine)) > 1 else ', which agree; others do not'}) got different batches in {loop}: "
                "they compute one replica together and need the same samples and the same augmentation. Give the "
                "dataloader of this loop a sampler with trainer.strategy.distributed_sampler_kwargs, or let Lightning "
                "do it (use_distributed_sampler=True), and seed random transforms alike "
                "(seed_everything(..., workers=True))"
            )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._compare("training", (args, kwargs))
        return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._compare("validation", (args, kwargs))
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._compare("testing", (args, kwargs))
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predictions leave the step, so they leave it whole."""
        self._compare("prediction", (args, kwargs))
        predicted = super().predict_step(*args, **kwargs)
        return pytree.tree_map(lambda leaf: whole(leaf) if isinstance(leaf, SplitTensor) else leaf, predicted)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Over the replicas: peers of one have the same values."""
        tensor = whole(tensor) if isinstance(tensor, SplitTensor) else tensor
        replicas = self.mesh.dp
        everyone = group is None or is_world(group)  # which is what Lightning's module passes
        if everyone and replicas.size == 1:
            self.mesh.rollcall.call(Place.METRIC, self._progress(), what="by all_gather")
            return tensor.unsqueeze(0)
        return super().all_gather(tensor, replicas.groups["gather"] if everyone else group, sync_grads)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        self._steps += 1
        if self.check_replicas_every and self._steps % self.check_replicas_every == 0:
            self.check_replicas()
        return result

    def check_replicas(self) -> None:
        """Insist that what tensor-parallel peers hold in common is equal to the bit. All ranks call it.

        Raises:
            RankMismatchError: naming the first parameter that differs.
        """
        common = [slot for slot in self.engine.slots.values() if slot.cut is None]
        mine = [_crc(slot.parameter) for slot in common]
        self.mesh.rollcall.call(Place.AGREE, len(mine), what="on replicated parameters")
        everyone = [said for said in self.mesh.rollcall.exchange(mine) if isinstance(said, list)]
        for ranks in self.mesh.layout.groups("tp"):
            for index, slot in enumerate(common):
                if len({everyone[rank][index] for rank in ranks}) > 1:
                    raise RankMismatchError(
                        f"{slot.name} is held by tensor-parallel ranks {ranks} in common but is no longer equal there "
                        f"(after {self._steps} optimizer steps): its gradients differed. Does the module draw random "
                        "numbers, read the rank, or depend on anything else that differs between these ranks?"
                    )


def _share_random_stream(strategy: TensorParallelStrategy) -> None:
    """Dropout on what peers hold in common must mask alike: they continue the stream of the first of them."""
    axis = strategy.mesh.tp
    if axis.size == 1:
        return
    state = torch.random.get_rng_state()
    device = strategy.root_device
    torch.random.set_rng_state(axis.broadcast(state.to(device), purpose="setup").cpu())
    if device.type == "cuda":
        own = torch.cuda.get_rng_state(device).to(device)
        torch.cuda.set_rng_state(axis.broadcast(own, purpose="setup").cpu(), device)


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
    return zlib.crc32(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes(), head)
