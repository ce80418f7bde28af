"""Lightning's model summary, which runs the module on its `example_input_array` outside of any step.

Sizes of inputs and outputs come from hooks of a forward. That forward is a step of ours: whatever rests sharded is
gathered for it, on all ranks. In a pipeline no rank could run it, so the table is shown without these sizes.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary

from lightning_dist.zero import ZeroEngine


def prepare(trainer: "pl.Trainer", *, whole: bool) -> None:
    """Prepare the summary callbacks of a trainer; `whole` says whether one rank can run the module."""
    every: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in every:
        if isinstance(callback, ModelSummary):
            vars(callback)["_summary"] = _WithinStep(type(callback)._summary.__get__(callback), whole=whole)


class _WithinStep:
    """``callback._summary``, run where the module may be."""

    def __init__(self, summarize: Callable[..., Any], *, whole: bool) -> None:
        self.summarize, self.whole = summarize, whole

    def __call__(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> Any:
        engine = ZeroEngine.of(module)
        if module.example_input_array is None or engine is None:
            return self.summarize(trainer, module)
        if self.whole:
            with engine.step("eval"):
                return self.summarize(trainer, module)
        example, module.example_input_array = module.example_input_array, None
        try:
            return self.summarize(trainer, module)
        finally:
            module.example_input_array = example
