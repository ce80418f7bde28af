"""Lightning's weight averaging callbacks, made to see whole weights.

`StochasticWeightAveraging`, `WeightAveraging` and `EMAWeightAveraging` keep a whole copy of the model, and read and
write the module's parameters outside of steps. They are Lightning's own, so their methods are run where that is right:
inside `gathered` (the float32 masters, also under mixed precision), on all ranks. Where ranks hold parts of the model
the average is whole on every rank nevertheless; the user is told.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_dist.comm import Mesh, Place
from lightning_dist.zero import ZeroEngine

_STOCHASTIC = (callbacks.StochasticWeightAveraging,)
_AVERAGING: tuple[type, ...] = tuple(filter(None, [getattr(callbacks, "WeightAveraging", None)]))


def prepare(trainer: "pl.Trainer", mesh: Mesh, *, sharded: bool) -> None:
    """Prepare the averaging callbacks of a trainer, before their `setup` is called."""
    every: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in every:
        if not isinstance(callback, _STOCHASTIC + _AVERAGING) or isinstance(vars(callback).get("setup"), _Setup):
            continue
        if sharded:
            rank_zero_warn(
                f"{type(callback).__name__} keeps a whole average of the model on every rank, and gathers the module "
                "for each update: memory that is saved otherwise, where every rank holds a part"
            )
        methods: Any = callback
        methods.setup = _Setup(methods.setup, callback, mesh)
        if isinstance(callback, _STOCHASTIC):
            methods.update_parameters = _Gathered(methods.update_parameters, position=1)
            methods.transfer_weights = _Gathered(methods.transfer_weights, position=1)
            methods.load_state_dict = _LoadStochastic(methods.load_state_dict, callback, trainer)
        else:
            methods._swap_models = _Gathered(methods._swap_models, position=0)
            methods._copy_average_to_current = _Gathered(methods._copy_average_to_current, position=0)
            methods.on_load_checkpoint = _Loading(methods.on_load_checkpoint)


class _Gathered:
    """A method that reads and writes the parameters of a module, which is its argument number `position`."""

    def __init__(self, method: Callable[..., Any], *, position: int) -> None:
        self.method, self.position = method, position

    def __call__(self, *args: Any) -> Any:
        engine = ZeroEngine.of(args[self.position])
        if engine is None:
            return self.method(*args)
        engine.end_step()  # these methods are called between steps; one without a backward may be open still
        with engine.gathered(engine.module):
            return self.method(*args)


class _Setup(_Gathered):
    """`setup` copies the module: whole, and the same on all ranks, as the module itself will be."""

    def __init__(self, method: Callable[..., Any], callback: "pl.Callback", mesh: Mesh) -> None:
        super().__init__(method, position=1)
        self.callback, self.mesh = callback, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "stage" in kwargs:
            args = (*args, kwargs["stage"])
        result = super().__call__(*args)
        average: nn.Module | None = getattr(self.callback, "_average_model", None)
        if average is None:
            return result
        self.mesh.rollcall.call(Place.SETUP, what=f"of {type(self.callback).__name__}")
        with torch.no_grad():
            for tensor in (*average.parameters(), *average.buffers()):
                if not tensor.is_meta:
                    first = tensor.detach().to(self.mesh.device, copy=True).contiguous()
                    tensor.copy_(self.mesh.world.broadcast(first, purpose="setup"))
        if isinstance(self.callback, _AVERAGING):
            update: Any = average
            vars(update)["update_parameters"] = _Gathered(update.update_parameters, position=0)
        return result


class _Loading:
    """`on_load_checkpoint` of `WeightAveraging` loads the module anew, from another key than "state_dict"."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def __call__(self, trainer: "pl.Trainer", module: "pl.LightningModule", checkpoint: dict[str, Any]) -> None:
        engine = ZeroEngine.of(module)
        assert engine is not None  # checkpoints are restored after the strategy's setup
        with engine.loading():
            self.method(trainer, module, checkpoint)


class _LoadStochastic:
    """A resumed averaging has replaced the schedulers; Lightning sees to that too early for us (in `on_fit_start`)."""

    def __init__(
        self, method: Callable[..., Any], callback: callbacks.StochasticWeightAveraging, trainer: "pl.Trainer"
    ) -> None:
        self.method, self.callback, self.trainer = method, callback, trainer

    def __call__(self, state: dict[str, Any]) -> None:
        self.method(state)
        if self.callback._scheduler_state is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self.callback._clear_schedulers(self.trainer)
