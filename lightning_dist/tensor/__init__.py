"""Tensor parallelism: matrices cut over the ranks of an axis, in modules that know nothing of it."""

from lightning_dist.tensor import rules as _rules  # fills the table of rules
from lightning_dist.tensor.cut import Report, cut_module

__all__ = ["Report", "cut_module"]
assert _rules.RULES
