"""What is composed from the engines below and usable in a plain PyTorch loop."""

from lightning_dist.engine.grad_norm import clip_by_norm, clip_by_value, grad_norm, grad_norms
from lightning_dist.engine.parallelize import Parallel, parallelize, undo
from lightning_dist.engine.placement import materialize, place_buffers
from lightning_dist.engine.plan import Plan
from lightning_dist.engine.summary import memory_line, size_words, step_bytes

__all__ = [
    "Parallel",
    "Plan",
    "clip_by_norm",
    "clip_by_value",
    "grad_norm",
    "grad_norms",
    "materialize",
    "memory_line",
    "parallelize",
    "place_buffers",
    "size_words",
    "step_bytes",
    "undo",
]
