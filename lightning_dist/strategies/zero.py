"""`ZeROStrategy`: ZeRO stages 0 to 3 under Lightning's Trainer.

What happens when, in Lightning's loop::

    setup            convert and shard the module, run configure_optimizers on it, adopt its optimizers
    training_step    begin a step; units are gathered as their forward comes
    backward         gather again, reduce while it runs; on return the fragments have their gradients
    optimizer.step   updates fragments; what is replicated is refreshed by a hook
    save_checkpoint  collect whole tensors on rank 0

After `fit` the module stays sharded (under zero3 its weights do not fit one device by assumption): read it inside
``with trainer.strategy.gathered(module):``, or save it.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.init import _EmptyInit
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.checkpoint import full_optimizer_state, full_state_dict, local_optimizer_state
from lightning_dist.comm import Place
from lightning_dist.core.errors import ConfigurationError, NonFiniteLossError, mixed_imports_hint
from lightning_dist.core.stages import stage_row
from lightning_dist.engine import clip_by_norm, grad_norm, grad_norms, materialize, memory_line, place_buffers
from lightning_dist.strategies import averaging, precision
from lightning_dist.strategies.base import DistributedStrategy, SharedSignal
from lightning_dist.strategies.loaders import OnUneven, align
from lightning_dist.strategies.whole import uncut
from lightning_dist.zero import ZeroEngine
from lightning_dist.zero.engine import Accumulate, StepKind

OnNonFinite = Literal["error", "skip", "ignore"]


class ZeROStrategy(DistributedStrategy):
    """Data parallelism that shards optimizer state (stage 1), gradients (2) and parameters (3); stage 0 replicates.

    Args:
        stage: 0, 1, 2 or 3.
        accumulate: what stages 2 and 3 do with gradients of micro-batches before the last of an accumulation:
            "shard" reduces each at once (memory of a shard), "local" sums locally and reduces once (fewer bytes sent).
        prefetch_bytes: how much stage 3 may gather ahead of need; by default as much as the largest unit.
        master_weights: with precision="bf16-true" or "16-true", keep the optimizer's weights in float32.
        on_nonfinite: what a NaN or infinite loss on any rank does: "error" stops the run naming rank and batch,
            "skip" skips that optimizer step on all ranks, "ignore" does not look.
        on_uneven: what to do when a rank runs out of batches before the others: "stop" ends the epoch on all ranks and
            says how many batches were dropped, "error" raises.
        checkpoint_format: "full", an ordinary Lightning checkpoint file.
        **kwargs: see `DistributedStrategy`.

    Raises:
        ConfigurationError: an argument that does not exist.
    """

    strategy_name = "zero"

    def __init__(
        self,
        stage: int = 3,
        *,
        accumulate: Accumulate = "shard",
        prefetch_bytes: int | None = None,
        master_weights: bool = False,
        on_nonfinite: OnNonFinite = "error",
        on_uneven: OnUneven = "stop",
        checkpoint_format: Literal["full"] = "full",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        stage_row(stage)
        _choose("accumulate", accumulate, ("shard", "local"))
        _choose("on_nonfinite", on_nonfinite, ("error", "skip", "ignore"))
        _choose("on_uneven", on_uneven, ("stop", "error"))
        _choose("checkpoint_format", checkpoint_format, ("full",))
        self.stage = stage
        self.accumulate: Accumulate = accumulate
        self.prefetch_bytes, self.master_weights = prefetch_bytes, master_weights
        self.on_nonfinite, self.on_uneven = on_nonfinite, on_uneven
        self._engine: ZeroEngine | None = None
        self._sync = True
        self._skip_step = False
        self._said = ""

    def __repr__(self) -> str:
        """Lightning prints this when it does not know the object, as the other package's Trainer does not."""
        return f"{type(self).__name__}(stage={self.stage}){mixed_imports_hint()}"

    # Setup ----------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> ZeroEngine:
        """The engine that shards the module; exists once the Trainer has set the strategy up."""
        if self._engine is None:
            raise ConfigurationError("the model is sharded only after trainer.fit, validate, test or predict has begun")
        return self._engine

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            averaging.prepare(module.trainer, self.mesh, sharded=self.stage == 3)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        SharedSignal(trainer, self.mesh.rollcall).install()
        if self._engine is None or self._engine.module is not self.lightning_module:
            self._engine = self._shard(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        precision.look_beyond_this_rank(self.precision_plugin, self._engine)
        line = self._line()
        if line != self._said:
            rank_zero_info(line)
            self._said = line

    def _line(self) -> str:
        """What is said once at setup."""
        return memory_line(self.engine)

    def _shard(self, module: "pl.LightningModule") -> ZeroEngine:
        previous = ZeroEngine.of(module)
        if previous is not None:
            previous.remove()
        uncut(module)
        plugin = self.precision_plugin
        precision.convert(plugin, module, master_weights=self.master_weights)
        materialize(module)
        place_buffers(module, self.root_device)
        self._cut(module)
        return ZeroEngine(
            module,
            self.mesh,
            stage=self.stage,
            compute_dtype=precision.compute_dtype(plugin, master_weights=self.master_weights),
            accumulate=self.accumulate,
            prefetch_bytes=self.prefetch_bytes,
        )

    def _cut(self, module: "pl.LightningModule") -> None:
        """Where parameters are divided in other ways before ZeRO takes them over."""

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        assert self.lightning_module is not None
        self.optimizers, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(self.lightning_module)
        for optimizer in self.optimizers:
            self._adopt(optimizer)

    def _adopt(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"{type(optimizer).__name__} is not a torch.optim.Optimizer; sharding replaces parameters in its "
                "groups and needs one"
            )
        self.engine.adopt(optimizer)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Modules are built on the CPU (or on meta, if the user says so); units move to the device one by one."""
        with _EmptyInit(enabled=bool(empty_init)), self.precision_plugin.tensor_init_context():
            yield

    @override
    def process_dataloader(self, dataloader: Iterable[Any]) -> Iterable[Any]:  # type: ignore[override]
        return align(dataloader, self.mesh.rollcall, self.on_uneven)

    # Steps ----------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        self._skip_step = False
        self.engine.begin_step("train")
        output = super().training_step(*args, **kwargs)
        if not self.lightning_module.automatic_optimization:
            self.engine.meet()
            self.engine.end_step()
        return output

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kind: StepKind = "eval"
        if self.engine.in_step == "train":  # a training step without a backward (statistics for an average)
            self.engine.meet()
            self.engine.end_step()
        with self.engine.step(kind):
            return step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output: STEP_OUTPUT = self._evaluate(super().validation_step, *args, **kwargs)
        return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output: STEP_OUTPUT = self._evaluate(super().test_step, *args, **kwargs)
        return output

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, *args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        self._check_finite(closure_loss)
        plugin, module = self.precision_plugin, self.lightning_module
        loss = plugin.pre_backward(closure_loss, module)
        self.engine.backward(
            loss, sync=self._sync, run=lambda: plugin.backward(loss, module, optimizer, *args, **kwargs)
        )
        if module.automatic_optimization:
            self.engine.meet()
            self.engine.end_step()
        return plugin.post_backward(loss, module)

    def _check_finite(self, loss: Tensor) -> None:
        if self.on_nonfinite == "ignore":
            return
        bad = not bool(torch.isfinite(loss.detach()).all())
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        where = f"rank {self.global_rank} at batch {trainer.fit_loop.batch_idx} of epoch {trainer.current_epoch}"
        if self.on_nonfinite == "skip":
            flags = self.mesh.rollcall.ask(Place.LOSS, int(bad))
            if any(flags):
                ranks = ", ".join(str(r) for r, flag in enumerate(flags) if flag)
                self._skip_step = True
                rank_zero_info(
                    f"loss is not finite on rank {ranks} at batch {trainer.fit_loop.batch_idx} of epoch "
                    f"{trainer.current_epoch}; all ranks skip this optimizer step"
                )
        elif bad:
            raise NonFiniteLossError(
                f"the loss is {float(loss.detach().flatten()[0])} on {where}. Look at that batch, or pass "
                'ZeROStrategy(on_nonfinite="skip") to skip such steps on all ranks, "ignore" to go on'
            )

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        if self.engine.needs_adoption(optimizer):
            self._adopt(optimizer)

        def guarded() -> Any:
            result = closure()
            if self._skip_step:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            return result

        return super().optimizer_step(optimizer, guarded, model, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._engine is not None:
            self._engine.reducer.abort()

    @override
    def teardown(self) -> None:
        """The module stays as it is, sharded, so that the next call of the Trainer goes on from it."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        if self._engine is not None:
            self._engine.in_step = None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # For users ------------------------------------------------------------------------------------------------

    def gathered(
        self, what: nn.Module | nn.Parameter | Iterable[nn.Parameter] | None = None, *, gradients: bool = False
    ) -> AbstractContextManager[None]:
        """Full values of parameters inside the block, to read and to write; see `ZeroEngine.gathered`. All ranks."""
        return self.engine.gathered(self.engine.module if what is None else what, gradients=gradients)

    def full_state_dict(self) -> dict[str, Any]:
        """The module's state dict with whole tensors on rank 0's CPU (meta tensors elsewhere). All ranks."""
        return full_state_dict(self.engine)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of the whole gradient, the same on all ranks. All ranks call it."""
        return grad_norm(self.engine, norm_type=norm_type)

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, float]:
        """Norms by parameter and in total, with the keys of Lightning's `grad_norm`. All ranks call it."""
        norms = {f"grad_{norm_type}_norm/{name}": float(v) for name, v in grad_norms(self.engine, norm_type).items()}
        norms[f"grad_{norm_type}_norm_total"] = float(self.grad_norm(norm_type))
        return norms

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip an optimizer's gradients by their norm over all ranks and return the norm before. All ranks call it."""
        return clip_by_norm(self.engine, precision.pieces_of(self.engine, unwrapped(optimizer)), max_norm, norm_type)

    # Checkpoints ----------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return full_state_dict(self.engine)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return full_optimizer_state(self.engine, unwrapped(optimizer))

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """A local file is mapped, not read: each rank touches only the pages of its own shards."""
        path = Path(str(checkpoint_path))
        if isinstance(self.checkpoint_io, TorchCheckpointIO) and path.is_file():
            checkpoint: dict[str, Any] = torch.load(
                path, map_location="cpu", mmap=_is_zip(checkpoint_path), weights_only=weights_only
            )
            return checkpoint
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        with self.engine.loading():
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(local_optimizer_state(self.engine, optimizer, saved))


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside Lightning's wrapper."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _choose(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} does not exist; use {' or '.join(repr(a) for a in allowed)}")


def _is_zip(path: _PATH) -> bool:
    """Files of torch's old format cannot be mapped."""
    with get_filesystem(path).open(str(path), "rb") as file:
        return bool(file.read(2) == b"PK")
