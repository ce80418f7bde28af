"""A plan says everything about how a module is parallelized; `parallelize` carries it out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lightning_dist.core.layout import Layout
from lightning_dist.pipeline.schedule import Schedule
from lightning_dist.zero.engine import Accumulate


@dataclass(frozen=True)
class Plan:
    """What is done along each axis of a layout.

    Args:
        layout: sizes of the axes; where `tp` is 1 nothing is cut.
        zero: ZeRO stage over the data-parallel axis, 0 to 3.
        accumulate, prefetch_bytes, compute_dtype: see `ZeroEngine`.
        tp_plan, sequence_parallel: see `cut_module`.
        pipelined: whether steps are run stage by stage, micro-batch by micro-batch; by default where `pp` is not 1.
        num_micro_batches, schedule, virtual_stages, layers, split, place, recompute: see `PipelineEngine`.
    """

    layout: Layout = field(default_factory=Layout)
    zero: int = 0
    accumulate: Accumulate = "shard"
    prefetch_bytes: int | None = None
    compute_dtype: torch.dtype | None = None
    tp_plan: Mapping[str, str] | None = None
    sequence_parallel: bool = False
    pipelined: bool | None = None
    num_micro_batches: int | None = None
    schedule: str | Path | Schedule = "1f1b"
    virtual_stages: int | None = None
    layers: str | Sequence[str] | None = None
    split: Sequence[int] | None = None
    place: Mapping[str, str] | None = None
    recompute: bool = False
