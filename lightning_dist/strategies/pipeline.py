"""`PipelineParallelStrategy`: groups of layers on different devices, micro-batches flowing through them.

In Lightning's loop a closure runs training_step, then zero_grad, then backward. The schedule runs whole in the first,
with all its forwards and backwards, and its gradients lie aside (`zero.aside`) until the third asks for them::

    training_step    split the batch; run the schedule; log once for the whole batch, on every rank
    zero_grad        of what earlier steps have left
    backward         hand the gradients over to the engine, which averages them over the replicas

The module is divided in place (`lightning_dist.pipeline`) before an engine takes its parameters over.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_dist.core.errors import ConfigurationError, UnsupportedOptimizerError
from lightning_dist.core.layout import Layout
from lightning_dist.engine import Plan, size_words, step_bytes
from lightning_dist.pipeline import PipelineEngine, PipelineReport
from lightning_dist.pipeline.schedule import Schedule
from lightning_dist.strategies.arguments import insist
from lightning_dist.strategies.replica import ReplicaStrategy, number_of_replicas
from lightning_dist.strategies.sharded import Loop
from lightning_dist.strategies.step_state import Recorder, Snapshot, refuse_manual_optimization, replay


class PipelineParallelStrategy(ReplicaStrategy):
    """Divides the layers of a module over `pp` ranks; the other ranks hold copies and average gradients.

    Args:
        pp: ranks per replica; by default all of the world.
        num_microbatches: parts that a batch is divided into (its samples, dim 0 of every tensor); by default four for
            each rank. A module may divide a batch itself, by a method ``split_batch(batch, num_micro_batches)``, and
            say what a part of it counts for, by ``loss_weight(batch)`` (the number of tokens that are learned, say).
        schedule: "gpipe", "1f1b", "interleaved", "zb_h1" or "zbv", a file, or a schedule; see docs/pipeline.md.
        virtual_stages: stages on each rank, for "interleaved".
        layers: where the layers are ("model.layers", or a list of names); by default they are searched.
        split: the number of layers of each stage; by default balanced by their estimated cost.
        place: which stages hold modules outside of the layers, as name patterns to "first", "last", "both" or "every".
        recompute: "full" keeps only the input of each layer for backward and computes the rest again.
        **kwargs: see `ReplicaStrategy`.

    Raises:
        ConfigurationError: an argument that does not exist; at setup, see `PipelineEngine`.
    """

    strategy_name = "pp"

    def __init__(
        self,
        pp: int | None = None,
        *,
        num_microbatches: int | None = None,
        schedule: str | Path | Schedule = "1f1b",
        virtual_stages: int | None = None,
        layers: str | Sequence[str] | None = None,
        split: Sequence[int] | None = None,
        place: Mapping[str, str] | None = None,
        recompute: Literal["full"] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        insist(
            pp=pp,
            num_microbatches=num_microbatches,
            schedule=schedule,
            virtual_stages=virtual_stages,
            layers=layers,
            split=split,
            place=place,
            recompute=recompute,
        )
        self.pp, self.num_microbatches, self.schedule, self.virtual_stages = (
            pp,
            num_microbatches,
            schedule,
            virtual_stages,
        )
        self.layers, self.split, self.place, self.recompute = layers, split, place, recompute
        self._report: PipelineReport | None = None

    @override
    def _settings(self) -> str:
        return f"pp={self.pp}, schedule={self.schedule!r}, num_microbatches={self.num_microbatches}"

    @property
    @override
    def layout(self) -> Layout:
        world = self.num_nodes * self.num_processes
        pp = self.pp or world
        return Layout(dp=number_of_replicas("pp", pp, world), pp=pp)

    # Setup ----------------------------------------------------------------------------------------------------

    @property
    def pipeline(self) -> PipelineEngine:
        """The engine that divides the module; exists once the Trainer has set the strategy up.

        Raises:
            ConfigurationError: it does not exist yet, or there are no stages.
        """
        engine = self.parallel.pipeline
        if engine is None:
            raise ConfigurationError(f"there are no stages: pp is 1 in {self.mesh.layout!r}")
        return engine

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.lightning_module is not None
        if self._has_stages:
            refuse_manual_optimization(self.lightning_module)
        super().setup(trainer)

    @property
    def _has_stages(self) -> bool:
        """Whether steps run stage by stage; in a pipeline of one rank, too."""
        return True

    @override
    def _plan(self) -> Plan:
        return replace(
            super()._plan(),
            pipelined=self._has_stages,
            num_micro_batches=self.num_microbatches,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            layers=self.layers,
            split=self.split,
            place=self.place,
            recompute=self.recompute == "full",
        )

    @override
    def _adopt(self, optimizer: Optimizer) -> None:
        if self._has_stages and isinstance(optimizer, LBFGS):
            raise UnsupportedOptimizerError(
                "LBFGS takes inner products over all parameters and runs the model several times in a step; in a "
                "pipeline no rank holds all of them. Use an optimizer that updates each parameter by itself (AdamW)"
            )
        super()._adopt(optimizer)

    @override
    def _line(self) -> str:
        layout, held = self.mesh.layout, sum(s.stop - s.start for s in self.engine.slots.values())
        replicas = f"; gradients of {layout.dp} replicas: {size_words(step_bytes(self.engine))} per step"
        return f"pp{layout.pp}: {self.pipeline.words()}; per rank here {held:,} parameters" + (
            replicas if layout.dp > 1 else ""
        )

    # Steps ----------------------------------------------------------------------------------------------------

    @override
    def _step(self, loop: Loop, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._has_stages:
            return super()._step(loop, run, args, kwargs)

        def pipelined(batch: Any, *rest: Any, **named: Any) -> Any:
            return self._run_schedule(loop, lambda part: run(part, *rest, **named), batch)

        return super()._step(loop, pipelined, args, kwargs)

    def _run_schedule(self, loop: Loop, step: Callable[[Any], Any], batch: Any) -> Any:
        module, pipeline = self.lightning_module, self.pipeline
        assert module is not None
        parts = pipeline.run_by_all_stages
        recorder, snapshot = Recorder(module), Snapshot(module, parts)

        @contextmanager
        def without_traces() -> Iterator[None]:
            before, noted = Snapshot(module, parts, thorough=True), recorder.noted()
            try:
                yield
            finally:
                before.restore()
                recorder.forget(noted)

        hooks: dict[str, Any] = {
            "weigh": getattr(module, "loss_weight", None),
            "split": getattr(module, "split_batch", None),
            "share": lambda shares: (recorder.logged(shares), snapshot.changes()),
            "without_traces": without_traces,
        }
        with recorder.recording(), self.parallel.stage_gathered():
            if loop == "training":
                with self.parallel.gradients_aside():
                    result = pipeline.forward_backward(step, batch, scale=self._scale(module), **hooks)
            else:
                result = pipeline.forward(step, batch, **hooks)
        logged, changes = result.shared
        if not pipeline.is_last:
            snapshot.apply(changes)
        replay(module, logged)
        return result.returned

    def _scale(self, module: "pl.LightningModule") -> float | Tensor:
        """What every loss is multiplied by: Lightning divides by the batches of an accumulation, a scaler scales."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        share = self._weight / module.trainer.accumulate_grad_batches
        return share if scaler is None else scaler.scale(torch.ones((), device=self.root_device)) * share

    @override
    def _backward(self, loss: Tensor, run: Callable[[], object]) -> None:
        if not self._has_stages:
            super()._backward(loss, run)
            return
        self.parallel.hand_over(sync=self._sync)

    # After a run ----------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        """Collect the spans of the last step while all ranks are here."""
        super().on_train_end()
        self._report = self.pipeline.report() if self._has_stages else None

    def timeline(self) -> PipelineReport:
        """The measured spans of the last training step, the bubble beside its formula, and a better split if any.

        Print it, look at ``.timeline``, or ``.save("timeline.html")`` (also .svg, .json for Perfetto, .txt).

        Raises:
            ConfigurationError: nothing was trained yet.
        """
        if self._report is None:
            raise ConfigurationError("there is a timeline only after trainer.fit")
        return self._report
