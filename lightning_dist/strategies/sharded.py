"""What runs a `ZeroEngine` under Lightning's Trainer, whatever has been done to the module before.

What happens when, in Lightning's loop::

    setup            convert and shard the module, run configure_optimizers on it, adopt its optimizers
    training_step    begin a step; units are gathered as their forward comes
    backward         gather again, reduce while it runs; on return the fragments have their gradients
    optimizer.step   updates fragments; what is replicated is refreshed by a hook
    save_checkpoint  collect whole tensors on rank 0

After `fit` the module stays sharded (under zero3 its weights do not fit one device by assumption): read it inside
``with trainer.strategy.gathered(module):``, or save it.

A kind of parallelism is a subclass. It says how the world is divided (`layout`), what is to be done to the module
(`_plan`, which `engine.parallelize` carries out) and what its line at setup is, and may change a step (`_step`, which
is handed what runs the module's method) and a backward (`_backward`, which is handed what runs autograd).
"""

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.comm import Mesh
from lightning_dist.core.errors import ConfigurationError, RankMismatchError, mixed_imports_hint
from lightning_dist.engine import Parallel, Plan, clip_by_norm, grad_norm, grad_norms, parallelize, undo
from lightning_dist.strategies import averaging, model_summary, precision
from lightning_dist.strategies.arguments import insist
from lightning_dist.strategies.checkpoints import CheckpointingStrategy, unwrapped
from lightning_dist.strategies.loaders import OnUneven, align
from lightning_dist.strategies.loss_weight import WeighedStep
from lightning_dist.strategies.nonfinite import LossWatch, OnNonFinite
from lightning_dist.strategies.signals import SharedSignals
from lightning_dist.strategies.whole import make_whole, remember
from lightning_dist.zero import ZeroEngine

Loop = Literal["training", "validation", "testing", "prediction"]


class ShardedStrategy(CheckpointingStrategy):
    """Base of all strategies with an engine; see the module docstring.

    Args:
        master_weights: with precision="bf16-true" or "16-true", keep the optimizer's weights in float32.
        on_nonfinite: what a NaN or infinite loss on any rank does: "error" stops the run naming rank and batch,
            "skip" skips that optimizer step on all ranks, "ignore" does not look.
        on_uneven: what to do when a rank runs out of batches before the others: "stop" ends the epoch on all ranks and
            says how many batches were dropped, "error" raises.
        checkpoint_format: "full", an ordinary Lightning checkpoint file.
        **kwargs: see `DistributedStrategy`.

    A module whose batches hold different numbers of what is learned may say so by a method ``loss_weight(batch)``: then
    accumulated batches and replicas together equal one big batch.

    Raises:
        ConfigurationError: an argument that does not exist.
    """

    def __init__(
        self,
        *,
        master_weights: bool = False,
        on_nonfinite: OnNonFinite = "error",
        on_uneven: OnUneven = "stop",
        checkpoint_format: Literal["full"] = "full",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        insist(
            master_weights=master_weights,
            on_nonfinite=on_nonfinite,
            on_uneven=on_uneven,
            checkpoint_format=checkpoint_format,
        )
        self.master_weights, self.on_uneven = master_weights, on_uneven
        self._losses = LossWatch(on_nonfinite)
        self._parallel: Parallel | None = None
        self._sync = True
        self._signals: SharedSignals | None = None
        self._said = ""
        self._recovered = False  # from a failed run, and no step since
        self._weighed = WeighedStep()
        self._weight = 1.0  # of the batch whose step runs

    @property
    def on_nonfinite(self) -> OnNonFinite:
        """What a NaN or infinite loss does."""
        return self._losses.on_nonfinite

    def __repr__(self) -> str:
        """Lightning prints this when it does not know the object, as the other package's Trainer does not."""
        return f"{type(self).__name__}({self._settings()}){mixed_imports_hint()}"

    @abstractmethod
    def _settings(self) -> str:
        """The arguments that tell one object of the class from another, in a few words."""

    # Setup ----------------------------------------------------------------------------------------------------

    @property
    def parallel(self) -> Parallel:
        """What was done to the module; exists once the Trainer has set the strategy up."""
        if self._parallel is None:
            raise ConfigurationError("the model is sharded only after trainer.fit, validate, test or predict has begun")
        return self._parallel

    @property
    @override
    def engine(self) -> ZeroEngine:
        """The engine that holds the parameters; exists once the Trainer has set the strategy up."""
        return self.parallel.zero

    @property
    def divides_parameters(self) -> bool:
        """Whether a rank holds less than the whole model while nothing is computed."""
        return False

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            averaging.prepare(module.trainer, self.mesh, sharded=self.divides_parameters)

    @override
    def _recover(self, mesh: Mesh) -> bool:
        forgotten = super()._recover(mesh)
        if self._parallel is not None and forgotten:
            self.engine.forget()
        self._recovered = True
        return forgotten

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        if self._signals is None:
            self._signals = SharedSignals(trainer, self.mesh.rollcall)
        self._signals.install(trainer)
        model_summary.prepare(trainer, whole=self.mesh.layout.pp == 1)
        if self._parallel is None or self._parallel.module is not self.lightning_module:
            self._parallel = self._parallelize(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        precision.look_beyond_this_rank(self.precision_plugin, self.engine)
        line = self._line()
        if line != self._said:
            rank_zero_info(line)
            self._said = line

    @abstractmethod
    def _line(self) -> str:
        """What is said once at setup."""

    def _plan(self) -> Plan:
        """What is to be done to the module."""
        dtype = precision.compute_dtype(self.precision_plugin, master_weights=self.master_weights)
        return Plan(self.mesh.layout, compute_dtype=dtype)

    def _parallelize(self, module: "pl.LightningModule") -> Parallel:
        previous = ZeroEngine.of(module)
        if previous is not None:
            previous.remove()
        make_whole(module)
        precision.convert(self.precision_plugin, module, master_weights=self.master_weights)
        parallel = parallelize(module, self._plan(), self.mesh)
        remember(module, partial(undo, cuts=parallel.cuts))
        return parallel

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
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._insist_on_one_state()
        return align(dataloader, self.mesh.rollcall, self.on_uneven)

    # Steps ----------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output: STEP_OUTPUT = self._step("training", super().training_step, args, kwargs)
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output: STEP_OUTPUT = self._step("validation", super().validation_step, args, kwargs)
        return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output: STEP_OUTPUT = self._step("testing", super().test_step, args, kwargs)
        return output

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("prediction", super().predict_step, args, kwargs)

    def _step(self, loop: Loop, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One step of any loop. ``run(*args, **kwargs)`` calls the module's own method under the precision plugin."""
        assert self.lightning_module is not None
        if loop != "training":
            self._act_on_signals()
            self._end_training_step()  # one without a backward may be open still (statistics for an average)
            with self.engine.step("eval"):
                return _not_ending(loop, run, args, kwargs)
        self._insist_on_one_state()
        self._losses.begin_step()
        self.engine.begin_step("train")
        self._weight = self._weigh(args)
        output = _not_ending(loop, run, args, kwargs)
        if not self.lightning_module.automatic_optimization:
            self._end_training_step()
        return output

    def _weigh(self, args: tuple[Any, ...]) -> float:
        """What the loss of a batch is multiplied by where the module says what batches count for; see `loss_weight`."""
        module = self.lightning_module
        weigh = getattr(module, "loss_weight", None)
        if weigh is None or module is None or not module.automatic_optimization:
            return 1.0
        accumulated = module.trainer.accumulate_grad_batches  # by which Lightning divides
        return accumulated * self._weighed.factor(float(weigh(args[0])), self.mesh)

    def _insist_on_one_state(self) -> None:
        """Ranks whose last run failed may have left off at different steps, each with its own part of the weights."""
        if not self._recovered:
            return
        assert self.lightning_module is not None
        self._recovered = False
        steps = self.mesh.rollcall.exchange(self.lightning_module.trainer.global_step)
        if len(set(steps)) > 1:
            raise RankMismatchError(
                f"the last run failed when ranks 0 to {len(steps) - 1} had made {steps} optimizer steps, so their "
                "parts of the weights do not belong together: call trainer.fit(..., ckpt_path=...) to go on from a "
                "checkpoint"
            )

    def _end_training_step(self) -> None:
        if self.engine.in_step == "train":
            self.engine.meet()
            self.engine.end_step()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        plugin, module = self.precision_plugin, self.lightning_module
        teaches = self._weight != 0  # else the loss is a mean over nothing, which has no gradient
        self._losses.look(closure_loss if teaches else closure_loss.new_zeros(()), module.trainer, self.mesh)
        weighed = closure_loss if self._weight == 1 else closure_loss * self._weight
        loss = plugin.pre_backward(weighed, module)
        self._backward(loss, lambda: plugin.backward(loss, module, optimizer, *args, **kwargs) if teaches else None)
        if module.automatic_optimization:
            if self._sync:
                self._weighed.close(self.engine)
            self._end_training_step()
        return plugin.post_backward(loss, module)

    def _backward(self, loss: Tensor, run: Callable[[], object]) -> None:
        """One backward, of a loss that may be scaled; `run` has autograd do it. On return fragments have gradients."""
        self.engine.backward(loss, sync=self._sync, run=run)

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
        return super().optimizer_step(optimizer, self._losses.guard(closure, optimizer), model, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._parallel is not None:
            self.engine.reducer.abort()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        """The module stays as it is, sharded, so that the next call of the Trainer goes on from it."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        if self._parallel is not None:
            self.engine.in_step = None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Signals --------------------------------------------------------------------------------------------------

    def _act_on_signals(self) -> None:
        if self._signals is not None:
            self._signals.act()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._signals is not None:
            self._signals.before_training_batch()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._act_on_signals()

    # For users ------------------------------------------------------------------------------------------------

    def gathered(
        self, what: nn.Module | nn.Parameter | Iterable[nn.Parameter] | None = None, *, gradients: bool = False
    ) -> AbstractContextManager[None]:
        """Full values of parameters inside the block, to read and to write; see `ZeroEngine.gathered`. All ranks."""
        return self.engine.gathered(self.engine.module if what is None else what, gradients=gradients)

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


def _not_ending(loop: Loop, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``run(*args, **kwargs)``, whose StopIteration Lightning would take for the end of the epoch, on this rank alone.

    Raises:
        RuntimeError: in its place, as for one that leaves a generator.
    """
    try:
        return run(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError(
            f"a step of {loop} raised StopIteration (a next() without a default, say), which would end the epoch on "
            "this rank and not on the others: catch it, or use next(iterator, None)"
        ) from error
