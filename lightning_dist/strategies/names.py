"""Strategy names: registered with Lightning, and explained when they are wrong."""

import sys
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dist.core.errors import MIXED_IMPORTS, ConfigurationError
from lightning_dist.core.layout import (
    HYBRID_NAMES,
    PIPELINE_NAMES,
    STRATEGY_NAMES,
    TENSOR_NAMES,
    ZERO_NAMES,
    explain_unknown_name,
)
from lightning_dist.strategies.hybrid import HybridStrategy
from lightning_dist.strategies.pipeline import PipelineParallelStrategy
from lightning_dist.strategies.tensor import TensorParallelStrategy
from lightning_dist.strategies.zero import ZeROStrategy


class _KnownNames(list[str]):
    """Lightning asks whether a name is in the list of those it knows; ours get a better answer than no."""

    def __contains__(self, name: object) -> bool:
        known = super().__contains__(name)
        if not known and isinstance(name, str) and (reason := explain_unknown_name(name)):
            raise ConfigurationError(reason)
        return known


def register() -> None:
    """Add our names to Lightning's registry; calling it again changes nothing."""
    kinds = (
        (ZERO_NAMES, ZeROStrategy, "ZeRO"),
        (TENSOR_NAMES, TensorParallelStrategy, "tensor parallelism"),
        (PIPELINE_NAMES, PipelineParallelStrategy, "a pipeline"),
        (HYBRID_NAMES, HybridStrategy, "several kinds of parallelism at once,"),
    )
    for names, kind, words in kinds:
        for name, arguments in names.items():
            if name not in StrategyRegistry:
                StrategyRegistry.register(name, kind, f"lightning_dist: {words} {arguments or ''}", False, **arguments)
    listed = type(StrategyRegistry).available_strategies
    answer = lambda: _KnownNames(listed(StrategyRegistry))  # noqa: E731 (an attribute of the instance)
    setattr(StrategyRegistry, "available_strategies", answer)  # noqa: B010 (the type says it is a method)
    _explain_mixed_imports()


def _explain_mixed_imports() -> None:
    """Where pytorch_lightning is in use too, its registry learns to explain the mix-up."""
    other = sys.modules.get("pytorch_lightning.strategies")
    if other is None:
        return

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConfigurationError(MIXED_IMPORTS)

    for name in STRATEGY_NAMES:
        if name not in other.StrategyRegistry:
            other.StrategyRegistry.register(name, refuse, description="lightning_dist, under another import")
