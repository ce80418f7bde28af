"""Tensor parallelism: matrices cut over the ranks of an axis, in modules that know nothing of it."""
