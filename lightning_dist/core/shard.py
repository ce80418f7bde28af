"""How the piece of a parameter that lives on a rank sits in the global tensor.

A `ShardSpec` is the one description that checkpoint, gradient norm and planner read; none of them asks an
engine. Names and global offsets say where numbers belong, never a rank: that is what lets any world read what
any other world wrote.
"""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class ShardSpec:
    """A contiguous run of a parameter, counted in the row-major order of its global shape.

    Args:
        name: fully qualified name of the parameter in the user's module (the first one, if it is tied).
        shape: global shape.
        start: first element held here.
        stop: one past the last element held here; ``start == stop`` when this rank holds none of it.
        copies: number of ranks that hold this same run (1 where it is sharded, N where it is replicated).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    copies: int = 1

    @property
    def numel(self) -> int:
        """Elements held here."""
        return self.stop - self.start

    @property
    def global_numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)


def shard_size(numel: int, num_shards: int) -> int:
    """Elements per shard of an even flat split: `numel` rounded up to a multiple of `num_shards`, divided."""
    return -(-numel // num_shards)


def overlap(start: int, stop: int, low: int, high: int) -> tuple[int, int]:
    """The part of [start, stop) inside [low, high), as offsets from `start`; empty ranges come back as (x, x)."""
    first = min(max(low, start), stop)
    last = max(min(high, stop), first)
    return first - start, last - start
