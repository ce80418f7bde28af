"""Ranks must have built the same thing: compared line by line before anything is sent that rests on it."""

import zlib
from collections.abc import Sequence

from lightning_dist.comm.rollcall import Place, RollCall
from lightning_dist.core.errors import RankMismatchError


def insist_on_equal(mine: Sequence[str], rollcall: RollCall, opening: str) -> None:
    """All ranks must say the same lines; collective.

    Args:
        mine: what this rank has, in words.
        rollcall: of the world.
        opening: the first sentence of the error.

    Raises:
        RankMismatchError: they do not; the message shows the first difference.
    """
    digests = rollcall.ask(Place.SETUP, zlib.crc32("\n".join(mine).encode()))
    if len(set(digests)) == 1:
        return
    everyone = [entry if isinstance(entry, list) else [] for entry in rollcall.exchange(list(mine))]
    for index in range(max(map(len, everyone))):
        said = [entries[index] if index < len(entries) else "nothing" for entries in everyone]
        if len(set(said)) > 1:
            lines = "\n".join(f"  rank {rank} has {words}" for rank, words in enumerate(said))
            raise RankMismatchError(f"{opening} The first difference:\n{lines}")


DIFFERENT_MODELS = "The ranks have built different models."
