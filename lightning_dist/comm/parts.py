"""Whole tensors and their parts: slicing along a `Split`, and putting parts together again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dist.core.split import Split


def part_of(whole: Tensor, dim: int, split: Split, rank: int) -> Tensor:
    """What `rank` holds of `whole`; a view where it is one run."""
    runs = [whole.narrow(dim, start, stop - start) for start, stop in split.parts[rank]]
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim)


def join(parts: Sequence[Tensor], dim: int, split: Split) -> Tensor:
    """The whole tensor from what each rank holds, block by block."""
    pieces = []
    for block in range(len(split.blocks)):
        for part, runs in zip(parts, split.parts, strict=True):
            before = sum(stop - start for start, stop in runs[:block])
            pieces.append(part.narrow(dim, before, runs[block][1] - runs[block][0]))
    return torch.cat(pieces, dim)


def put(whole: Tensor, part: Tensor, dim: int, split: Split, rank: int) -> None:
    """Write a rank's part into `whole`, in place."""
    before = 0
    for start, stop in split.parts[rank]:
        whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, before, stop - start))
        before += stop - start
