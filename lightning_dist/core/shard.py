"""How the piece of a parameter that lives on a rank sits in the global tensor.

A `ShardSpec` is the one description that checkpoint, gradient norm and planner read; none of them asks an
engine. Names and global offsets say where numbers belong, never a rank: that is what lets any world read what
any other world wrote.
"""

from dataclasses import dataclass
from math import prod

from lightning_dist.core.split import Split

CUT = "_lightning_dist_cut"
"""Attribute under which a tensor-parallel parameter carries its `Cut`."""


@dataclass(frozen=True)
class Cut:
    """A parameter of which each tensor-parallel rank holds a part: `split` of dim `dim` of the whole `shape`."""

    shape: tuple[int, ...]
    dim: int
    split: Split
    rank: int

    def local_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """The shape of a rank's part (default: of this rank's)."""
        size = self.split.sizes[self.rank if rank is None else rank]
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def cut_of(parameter: object) -> Cut | None:
    """How a parameter is cut by tensor parallelism, None where it is whole."""
    cut: Cut | None = getattr(parameter, "__dict__", {}).get(CUT)
    return cut


HOME = "_lightning_dist_home"
"""Attribute under which a parameter or a module carries its `Home`, where a pipeline has divided the module."""


@dataclass(frozen=True)
class Home:
    """Which pipeline ranks hold a parameter (several, where it is tied or shared); `rank` is the one that asks."""

    ranks: tuple[int, ...]
    rank: int

    @property
    def here(self) -> bool:
        """Whether this rank is one of them."""
        return self.rank in self.ranks

    @property
    def first(self) -> int:
        """The one that speaks for all."""
        return self.ranks[0]


def home_of(thing: object) -> Home | None:
    """Where a parameter or module lives, None where every rank holds it."""
    home: Home | None = getattr(thing, "__dict__", {}).get(HOME)
    return home


@dataclass(frozen=True)
class ShardSpec:
    """A contiguous run of a parameter, counted in the row-major order of its shape on one tensor-parallel rank.

    Args:
        name: fully qualified name of the parameter in the user's module (the first one, if it is tied).
        shape: the shape that the run is counted in: the whole one, or after `cut` that of this rank's part.
        start: first element held here.
        stop: one past the last element held here; ``start == stop`` when this rank holds none of it.
        copies: number of ranks that hold this same run (1 where it is sharded, N where it is replicated).
        cut: how tensor parallelism has cut the parameter, None where it is whole.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    copies: int = 1
    cut: Cut | None = None

    @property
    def numel(self) -> int:
        """Elements held here."""
        return self.stop - self.start

    @property
    def shape_numel(self) -> int:
        """Elements of the tensor that the run is counted in."""
        return prod(self.shape)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.shape if self.cut is None else self.cut.shape


def shard_size(numel: int, num_shards: int) -> int:
    """Elements per shard of an even flat split: `numel` rounded up to a multiple of `num_shards`, divided."""
    return -(-numel // num_shards)


def overlap(start: int, stop: int, low: int, high: int) -> tuple[int, int]:
    """The part of [start, stop) inside [low, high), as offsets from `start`; empty ranges come back as (x, x)."""
    first = min(max(low, start), stop)
    last = max(min(high, stop), first)
    return first - start, last - start
