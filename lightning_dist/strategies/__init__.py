"""Lightning adapters: thin, one class per kind of parallelism. The only room that knows Lightning."""

from lightning_dist.strategies.hybrid import HybridStrategy
from lightning_dist.strategies.names import register
from lightning_dist.strategies.pipeline import PipelineParallelStrategy
from lightning_dist.strategies.sharded import ShardedStrategy
from lightning_dist.strategies.tensor import TensorParallelStrategy
from lightning_dist.strategies.zero import ZeROStrategy

__all__ = [
    "HybridStrategy",
    "PipelineParallelStrategy",
    "ShardedStrategy",
    "TensorParallelStrategy",
    "ZeROStrategy",
    "register",
]
