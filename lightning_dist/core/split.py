"""How one dim of a tensor is divided over the ranks of an axis.

Tensor parallelism cuts matrices along one dim. Mostly a rank's part is one run of indices; a matrix that holds several
blocks side by side (a fused query-key-value projection) is cut inside each block, so that every rank gets its part of
each::

    even_split(6, 2)             rank 0: 0 1 2          rank 1: 3 4 5
    even_split(12, 2, blocks=3)  rank 0: 0 1 4 5 8 9    rank 1: 2 3 6 7 10 11     three blocks of 4

Parts may be unequal where the size does not divide (a vocabulary): no padding is stored, so none can be trained, win a
softmax or reach a checkpoint.
"""

from dataclasses import dataclass
from functools import cached_property

from lightning_dist.core.errors import ConfigurationError

Run = tuple[int, int]
"""Indices [start, stop)."""


@dataclass(frozen=True)
class Split:
    """For each rank, the runs of indices that it holds, in the order in which it holds them.

    `blocks` are the sizes of the blocks that the dim consists of; each is divided over all ranks.
    """

    parts: tuple[tuple[Run, ...], ...]
    blocks: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks that share the dim."""
        return len(self.parts)

    @cached_property
    def size(self) -> int:
        """The size of the whole dim."""
        return sum(self.blocks)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Indices that each rank holds."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.parts)

    @cached_property
    def is_even(self) -> bool:
        """Whether all ranks hold equally many."""
        return len(set(self.sizes)) == 1

    def start(self, rank: int) -> int:
        """First index of a rank, where its part is one run."""
        return self.parts[rank][0][0]

    def block(self, index: int) -> "Split":
        """The split of one block alone."""
        offset = sum(self.blocks[:index])
        parts = tuple(((runs[index][0] - offset, runs[index][1] - offset),) for runs in self.parts)
        return Split(parts, (self.blocks[index],))

    def times(self, inner: int) -> "Split":
        """The split of this dim merged with the `inner` elements that follow each index."""
        parts = tuple(tuple((start * inner, stop * inner) for start, stop in runs) for runs in self.parts)
        return Split(parts, tuple(size * inner for size in self.blocks))

    def repeated(self, outer: int) -> "Split":
        """The split after this dim is merged with one of size `outer` before it: as many times the blocks."""
        shifts = [index * self.size for index in range(outer)]
        parts = tuple(tuple((shift + a, shift + b) for shift in shifts for a, b in runs) for runs in self.parts)
        return Split(parts, self.blocks * outer)

    def over(self, inner: int) -> "Split | None":
        """The split after the dim is viewed as (size / inner, inner); None where a part would be torn."""
        edges = [edge for runs in self.parts for run in runs for edge in run] + list(self.blocks)
        if inner == 0 or any(edge % inner for edge in edges):
            return None
        parts = tuple(tuple((start // inner, stop // inner) for start, stop in runs) for runs in self.parts)
        return Split(parts, tuple(size // inner for size in self.blocks))


def even_split(size: int, num_ranks: int, *, blocks: int | tuple[int, ...] = 1, unit: int = 1) -> Split:
    """Divide `size` indices over `num_ranks` as evenly as whole units allow; later ranks get less.

    Args:
        blocks: number of equal blocks, or their sizes; each is divided by itself.
        unit: indices that stay together, such as those of an attention head.

    Raises:
        ConfigurationError: blocks or units that do not fill the size.
    """
    sizes = blocks if isinstance(blocks, tuple) else (size // blocks,) * blocks
    if sum(sizes) != size or any(block % unit for block in sizes):
        raise ConfigurationError(f"a dim of {size} does not consist of blocks of {sizes} in units of {unit}")
    parts: list[list[Run]] = [[] for _ in range(num_ranks)]
    offset = 0
    for block in sizes:
        share = -(-(block // unit) // num_ranks) * unit
        for rank, runs in enumerate(parts):
            runs.append((offset + min(rank * share, block), offset + min((rank + 1) * share, block)))
        offset += block
    return Split(tuple(tuple(runs) for runs in parts), tuple(sizes))
