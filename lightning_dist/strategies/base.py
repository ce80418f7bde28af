"""What all our strategies share under Lightning: processes, the process group, and small collectives.

Every collective that Lightning or a user asks for is announced by roll call first, so a call that only some
ranks make is an error that names both places, not a hang.
"""

import inspect
import sys
import traceback
import zlib
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities import rank_zero
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core import rank_zero as rank_zero_utilities
from torch import Tensor
from typing_extensions import override

from lightning_dist.comm import Mesh, Place
from lightning_dist.comm.world import leave_at_exit
from lightning_dist.core.allocator import keep_freed_memory
from lightning_dist.core.errors import ConfigurationError, PeerLostError, RankMismatchError
from lightning_dist.core.layout import Layout
from lightning_dist.strategies.arguments import insist
from lightning_dist.strategies.launcher import ShardedMultiProcessingLauncher

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
DEFAULT_TIMEOUT = timedelta(minutes=30)
_TOGETHER = (PeerLostError, RankMismatchError, SIGTERMException)
_OPS = {"mean": "sum", "avg": "sum", "sum": "sum", "max": "max", "min": "min"}


class DistributedStrategy(ParallelStrategy):
    """Base of our strategies; see the module docstring.

    Args:
        start_method: how Lightning starts the processes of a node: "popen" runs the script again, the others are
            those of multiprocessing.
        process_group_backend: "gloo" or "nccl"; by default what suits the device.
        timeout: how long a collective may wait for a peer.
        keep_freed_memory: on the CPU, let the allocator keep what a step frees; see `core.allocator`.
        **kwargs: what every Lightning `ParallelStrategy` takes (accelerator, plugins, cluster environment).

    Raises:
        ConfigurationError: an argument that does not exist, or a value that it does not take.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        start_method: StartMethod = "popen",
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        keep_freed_memory: bool = True,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ConfigurationError(
                f"{type(self).__name__} takes no {', '.join(unknown)}; its arguments are {', '.join(_arguments(self))}"
            )
        insist(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            start_method=start_method,
            process_group_backend=process_group_backend,
            timeout=timeout,
            keep_freed_memory=keep_freed_memory,
        )
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._start_method = start_method
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._keep_freed_memory = keep_freed_memory
        self._num_nodes = 1
        self._mesh: Mesh | None = None
        self._failed = False  # the last run, on this rank

    # Ranks ----------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Lightning gives a sampler per rank only to strategies that say so."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        if self.local_rank >= len(self.parallel_devices):
            raise ConfigurationError(
                f"local rank {self.local_rank} has no device: this node offers {len(self.parallel_devices)}. Start as "
                "many processes per node as Trainer(devices=...) names"
            )
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def mesh(self) -> Mesh:
        """The mesh of ranks; exists once the Trainer runs."""
        if self._mesh is None:
            raise ConfigurationError("the mesh exists only after trainer.fit, validate, test or predict has begun")
        return self._mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that compute one replica together read the same samples."""
        layout = self.layout
        return {"num_replicas": layout.dp, "rank": layout.coordinates(self.global_rank)["dp"]}

    @property
    def layout(self) -> Layout:
        """How the world is divided; subclasses override it."""
        return Layout(dp=self.num_nodes * self.num_processes)

    # Start-up -------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = ShardedMultiProcessingLauncher(self, start_method=self._start_method)

    def set_world_ranks(self) -> None:
        """Tell the environment, and Lightning's rank-zero helpers, who this process is."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for module in (rank_zero, rank_zero_utilities):
            setattr(module.rank_zero_only, "rank", self.global_rank)  # noqa: B010 (an attribute of a function)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._keep_freed_memory and self.root_device.type == "cpu":
            keep_freed_memory()
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        device_id = self.root_device if self.root_device.type != "cpu" else None
        leave_at_exit()
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device_id)
        if self._mesh is None:
            self._mesh = Mesh.from_world(self.layout, self.root_device, timeout=self._timeout.total_seconds())
        elif self._failed or self._mesh.aborted:
            self._recover(self._mesh)
        _one_line_for_lost_peers()

    def _recover(self, mesh: Mesh) -> bool:
        """Begin anew with the ranks of a run that failed; whether what was under way is forgotten."""
        self._failed = False
        return mesh.recover()

    @override
    def model_to_device(self) -> None:
        """Parameters move unit by unit when they are sharded; see `engine.placement`."""

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Ranks that wait for this one stop at once and say why, unless all ranks have raised this together."""
        self._failed = True
        if self._mesh is not None and not isinstance(exception, _TOGETHER):
            self._mesh.abort(f"{type(exception).__name__}: {exception}")

    # Collectives ----------------------------------------------------------------------------------------------

    def _progress(self) -> int:
        """A number that is the same on ranks at the same point of the run."""
        module = self.lightning_module
        if module is None or module._trainer is None:
            return 0
        trainer = module.trainer
        stage = zlib.crc32(str(trainer.state.stage).encode()) % 97
        return (trainer.global_step * 100_003 + trainer.fit_loop.epoch_loop.total_batch_idx) * 100 + stage

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any | str | None = "mean"
    ) -> Tensor | Any:
        """Reduce a tensor over the data-parallel ranks; other values come back as they are."""
        if not isinstance(tensor, Tensor) or self._mesh is None:
            return tensor
        name = str(reduce_op).lower().removeprefix("redoptype.").removeprefix("reduceop.")
        if name not in _OPS:
            raise ConfigurationError(f"reduce_op={reduce_op!r} is not supported; use one of {', '.join(_OPS)}")
        described = f"by {name}, {tensor.dtype} of shape {tuple(tensor.shape)}"
        self.mesh.rollcall.call(
            Place.METRIC, self._progress() * 997 + zlib.crc32(described.encode()) % 997, what=described
        )
        value = tensor.detach().to(self.root_device, copy=True).contiguous()
        if value.dtype is torch.bool or (name in ("mean", "avg") and not value.is_floating_point()):
            value = value.float()
        self.mesh.dp.all_reduce(value.view(-1), purpose="metrics", op=_OPS[name])
        return value / self.mesh.dp.size if name in ("mean", "avg") else value

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all ranks, also where `reduce` goes over replicas: Lightning compares with the world's size."""
        if self._mesh is None:
            return decision
        said = self.mesh.rollcall.ask(Place.AGREE, int(decision), what="on a decision")
        return bool(min(said) if all else max(said))

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._mesh is not None:
            self.mesh.rollcall.call(Place.BARRIER, zlib.crc32((name or "").encode()), what=name or "")

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if self._mesh is None:
            return obj
        self.mesh.rollcall.call(Place.BROADCAST, src)
        return self.mesh.rollcall.broadcast(obj, src)  # type: ignore[return-value]

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        self.mesh.rollcall.call(Place.METRIC, self._progress(), what="by all_gather")
        return super().all_gather(tensor, group, sync_grads)


def _arguments(strategy: DistributedStrategy) -> list[str]:
    """The names that its class and the classes below it take."""
    kinds = [kind for kind in type(strategy).__mro__ if issubclass(kind, DistributedStrategy)]
    every = (p for kind in kinds if "__init__" in vars(kind) for p in inspect.signature(kind).parameters.values())
    return [p.name for p in every if p.kind is not p.VAR_KEYWORD]


def _one_line_for_lost_peers() -> None:
    """A rank that stops only because another one failed says so in one line: the traceback to read is the other's."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, PeerLostError):
            print("".join(traceback.format_exception_only(error)).strip(), file=sys.stderr, flush=True)
        else:
            shown(kind, error, trace)

    if not getattr(shown, "_lightning_dist", False):
        hook._lightning_dist = True  # type: ignore[attr-defined]
        sys.excepthook = hook
