"""Ranks with unequal numbers of batches: stop together, and say what was left.

A rank that runs out of data would leave the others waiting in a collective for ever. Loaders of equal known length
need nothing. For others the ranks ask each other before every batch whether all still have one; when one has not,
the epoch ends for all, or raises under ``on_uneven="error"``.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from lightning.fabric.utilities.data import sized_len
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_dist.comm import Place, RollCall
from lightning_dist.core.errors import RankMismatchError

OnUneven = Literal["stop", "error"]
COUNT_LIMIT = 1000
"""Batches that are read at most, after the common end, to say how many were left."""
UNKNOWN = -1


def align(loader: Iterable[Any], rollcall: RollCall, on_uneven: OnUneven) -> Iterable[Any]:
    """`loader` itself where all ranks have equally many batches, else one that ends on all ranks together."""
    length = sized_len(loader)
    lengths = rollcall.ask(Place.LOADER, UNKNOWN if length is None else length)
    if len(set(lengths)) == 1 and length is not None:
        return loader
    kind = AlignedLoader if UNKNOWN in lengths else SizedAlignedLoader
    return kind(loader, rollcall, on_uneven, lengths)


class AlignedLoader:
    """Iterates a loader for as long as every rank has a batch; everything else is the loader's own."""

    def __init__(self, loader: Iterable[Any], rollcall: RollCall, on_uneven: OnUneven, lengths: list[int]) -> None:
        self._loader, self._rollcall, self._on_uneven, self._lengths = loader, rollcall, on_uneven, lengths

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        source = iter(self._loader)
        taken = 0
        while True:
            batch = next(source, _END)
            have = self._rollcall.ask(Place.LOADER, int(batch is not _END))
            if not all(have):
                break
            taken += 1
            yield batch
        if any(have):
            self._report(taken, have, 0 if batch is _END else 1 + _count(source))

    def _report(self, taken: int, have: list[int], left: int) -> None:
        lefts = self._rollcall.ask(Place.LOADER, left)
        short = [rank for rank, there in enumerate(have) if not there]
        dropped = ", ".join(f"rank {r}: {n}{'+' if n > COUNT_LIMIT else ''}" for r, n in enumerate(lefts) if n)
        message = (
            f"rank {short[0]} ran out of data after {taken} batches; dropped on the other ranks: {dropped} batches"
        )
        if self._on_uneven == "error":
            raise RankMismatchError(
                f'{message} (on_uneven="error"). Give all ranks equally many batches, or use on_uneven="stop"'
            )
        rank_zero_warn(f"{message}. All ranks end the epoch here.")


class SizedAlignedLoader(AlignedLoader):
    """With a length, where every rank knows its own: the smallest of them."""

    def __len__(self) -> int:
        return min(self._lengths)


def _count(source: Iterator[Any]) -> int:
    return sum(1 for _, _ in zip(range(COUNT_LIMIT), source, strict=False))


_END = object()
