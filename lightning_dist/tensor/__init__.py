"""Tensor parallelism: matrices cut over the ranks of an axis, in modules that know nothing of it."""

from lightning_dist.tensor.cut import Report, cut_module, uncut_module
from lightning_dist.tensor.rules import RULES
from lightning_dist.tensor.split_tensor import in_whole

__all__ = ["RULES", "Report", "cut_module", "in_whole", "uncut_module"]
