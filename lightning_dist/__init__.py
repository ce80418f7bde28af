"""One LightningModule, written for one device, trains under any layout by changing one argument.

Importing this package registers its strategy names with Lightning::

    import lightning as L
    import lightning_dist

    L.Trainer(strategy="zero3", devices=8).fit(module)
"""

from lightning_dist.strategies import (
    HybridStrategy,
    PipelineParallelStrategy,
    ShardedStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
    register,
)

__version__ = "0.1.0"
__all__ = [
    "HybridStrategy",
    "PipelineParallelStrategy",
    "ShardedStrategy",
    "TensorParallelStrategy",
    "ZeROStrategy",
    "__version__",
]

register()
