"""A layout says how a world of ranks is divided into axes, and where each rank sits.

The axes are laid out like the digits of a number, the fastest last::

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank

so tensor-parallel peers are neighbours (they talk most and should share a node), then data-parallel
replicas, then pipeline stages. Example, ``Layout(pp=2, dp=2, tp=2)``::

    stage 0: [0 1] [2 3]      stage 1: [4 5] [6 7]      brackets: tp peers
"""

import itertools
import re
from dataclasses import dataclass

from lightning_dist.core.errors import ConfigurationError

AXES = ("pp", "dp", "tp")
"""Axis names, slowest first."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes; their product is the world size.

    Raises:
        ConfigurationError: a size below 1.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise ConfigurationError(f"{axis}={self.size(axis)} is not a size; use 1 or more ranks per axis")

    @property
    def world_size(self) -> int:
        """Number of ranks in the whole layout."""
        return self.dp * self.tp * self.pp

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a global rank along every axis.

        Raises:
            ConfigurationError: the rank is outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigurationError(f"rank {rank} is outside a world of {self.world_size} ranks ({self!r})")
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, self.size(axis))
        return position

    def rank_at(self, coordinates: dict[str, int]) -> int:
        """Global rank at a position; the inverse of `coordinates`."""
        rank = 0
        for axis in AXES:
            rank = rank * self.size(axis) + coordinates[axis]
        return rank

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ranks that differ only along `axis`, in rank order."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            position = self.coordinates(rank)
            members.setdefault(tuple(position[other] for other in AXES if other != axis), []).append(rank)
        return list(members.values())

    def __str__(self) -> str:
        """A picture: stages below each other, replicas side by side, tp peers in brackets."""
        head = [f"replica {replica}" for replica in range(self.dp)]
        rows = [
            [
                "[" + " ".join(str(self.rank_at({"pp": pp, "dp": dp, "tp": tp})) for tp in range(self.tp)) + "]"
                for dp in range(self.dp)
            ]
            for pp in range(self.pp)
        ]
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(self.dp)]
        names = [f"stage {pp}" for pp in range(self.pp)] if self.pp > 1 else [""]
        margin = max(map(len, names)) + 2 if self.pp > 1 else 0
        lines = [(" " * margin, head)] if self.dp > 1 else []
        lines += [(name.ljust(margin), row) for name, row in zip(names, rows, strict=True)]
        pictures = [
            (left + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))).rstrip()
            for left, cells in lines
        ]
        return "\n".join([f"{self.world_size} ranks: tp {self.tp}, dp {self.dp}, pp {self.pp}", *pictures])

    def replicas(self) -> list[list[int]]:
        """The ranks that compute one replica of the module together (the same place along dp), replica by replica."""
        members: list[list[int]] = [[] for _ in range(self.dp)]
        for rank in range(self.world_size):
            members[self.coordinates(rank)["dp"]].append(rank)
        return members


def balanced_layout(world_size: int, ranks_per_node: int) -> Layout:
    """Axes as equal in size as can be, tp within a node and preferably a power of 2, larger than pp, larger than dp."""
    sizes = [
        (tp, pp, world_size // (tp * pp))
        for tp in range(1, ranks_per_node + 1)
        if ranks_per_node % tp == 0 and world_size % tp == 0
        for pp in range(1, world_size // tp + 1)
        if world_size // tp % pp == 0
    ]
    tp, pp, dp = min(sizes, key=lambda s: (max(s) / min(s), s[0] & (s[0] - 1) != 0, -s[0], -s[1]))
    return Layout(dp=dp, tp=tp, pp=pp)


def explain_sizes(tp: int, pp: int, world_size: int) -> str:
    """Why these sizes do not fill the world, and which do."""
    sizes = [(a, b) for a in range(1, world_size + 1) for b in range(1, world_size + 1) if world_size % (a * b) == 0]
    near = [size for size in sizes if tp == size[0] or pp == size[1]] or sizes
    fitting = [f"tp={a} pp={b}" for a, b in near]
    return f"tp={tp} times pp={pp} does not divide the {world_size} ranks of this run; use {', '.join(fitting)}"


ZERO_NAMES: dict[str, dict[str, int]] = {f"zero{stage}": {"stage": stage} for stage in range(4)}
TENSOR_NAMES: dict[str, dict[str, int]] = {"tp": {}} | {f"tp{size}": {"tp": size} for size in (2, 4, 8)}
PIPELINE_NAMES: dict[str, dict[str, int]] = {"pp": {}} | {f"pp{size}": {"pp": size} for size in (2, 4, 8, 16)}


def _hybrid_names() -> dict[str, dict[str, int]]:
    """``tpA_ppB``, with ``_zeroN`` after both or one of them, and ``3d``."""
    tensor: dict[str, dict[str, int]] = {"": {}} | {f"tp{size}": {"tp": size} for size in (2, 4, 8)}
    pipeline: dict[str, dict[str, int]] = {"": {}} | {f"pp{size}": {"pp": size} for size in (2, 4, 8, 16)}
    zero = {"": {"zero": 0}} | {f"zero{stage}": {"zero": stage} for stage in (1, 2, 3)}
    names = {"3d": {"zero": 1}} | {f"3d_zero{stage}": {"zero": stage} for stage in (1, 2, 3)}
    for parts in itertools.product(tensor.items(), pipeline.items(), zero.items()):
        said = [name for name, _ in parts if name]
        if len(said) > 1:
            names["_".join(said)] = {key: value for _, arguments in parts for key, value in arguments.items()}
    return names


HYBRID_NAMES = _hybrid_names()
STRATEGY_NAMES: dict[str, dict[str, int]] = ZERO_NAMES | TENSOR_NAMES | PIPELINE_NAMES | HYBRID_NAMES
"""Registered strategy names and the arguments that each stands for."""

GRAMMAR = (
    "known names are "
    + ", ".join(f'"{name}"' for name in ZERO_NAMES | TENSOR_NAMES | PIPELINE_NAMES)
    + ": zero0 replicates everything (plain data parallelism), zero1 shards the optimizer state, "
    "zero2 the gradients too, zero3 the parameters too; tp cuts matrices over all devices of a node, tp2, tp4 and tp8 "
    "over so many ranks, other sizes are TensorParallelStrategy(tp=...); pp divides the layers over all ranks, pp2, "
    "pp4, pp8 and pp16 over so many, other sizes are PipelineParallelStrategy(pp=...); they are put together in this "
    'order, "tp2_pp2", "tp2_zero1", "pp2_zero1", "tp2_pp2_zero1", the ranks that are left being replicas, and other '
    'sizes are HybridStrategy(tp=, pp=, zero=); "3d" is a balanced layout with zero1'
)


def explain_unknown_name(name: str) -> str | None:
    """Why a strategy name that looks like one of ours is not known, or None when it does not look like ours."""
    if name in STRATEGY_NAMES or not re.match(r"^(zero|3d|(tp|pp)\d*(_|$))", name.replace("-", "_")):
        return None
    return f'strategy="{name}" is not a name that lightning_dist knows; {GRAMMAR}'
