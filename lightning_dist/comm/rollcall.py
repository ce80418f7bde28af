"""Roll call: before ranks enter a collective that one of them might miss, they say where they are.

Collectives carry no names. When rank 0 saves a checkpoint alone while rank 1 has gone on to its next backward,
the first hangs, or worse, two unrelated collectives pair up and a wrong number comes out. So every rank first
announces its *place* (a kind and a number) by an all-gather of 16 bytes on the CPU::

    rank 0: (SAVE, 7)      rank 1: (GATHER, 3)     ->  both raise RankMismatchError at once, naming both places

Gathering parameters is the one place where the others help: a rank whose data skips a layer asks for fewer
gathers than its peers, so whoever hears a request while waiting somewhere else takes part in that gather and
then announces itself again. A mismatch is an error only when the places cannot be brought together this way.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

import torch
import torch.distributed as dist

from lightning_dist.comm.board import Terms
from lightning_dist.comm.collectives import all_gather_single
from lightning_dist.comm.ledger import Ledger
from lightning_dist.comm.neighbours import said_by_all
from lightning_dist.comm.shared import SharedMemory
from lightning_dist.comm.watch import Watch
from lightning_dist.core.errors import ConfigurationError, PeerLostError, RankMismatchError


class Place(IntEnum):
    """Where a rank can be when it announces itself."""

    GATHER = 1
    BACKWARD_END = 2
    METRIC = 3
    BARRIER = 4
    SAVE = 5
    GATHERED = 6
    LOADER = 7
    BROADCAST = 8
    SETUP = 9
    NORM = 10
    LOSS = 11
    REDUCE = 12
    STEP_END = 13
    BATCH = 14
    REFRESH = 15
    BUFFERS = 16
    BACKWARD_BEGIN = 17
    READ = 18
    AGREE = 19

    @property
    def words(self) -> str:
        """How to say it to a person."""
        return _WORDS[self]


_WORDS = {
    Place.GATHER: "in a forward or backward pass, gathering parameters",
    Place.BACKWARD_BEGIN: "at the beginning of a backward pass",
    Place.BACKWARD_END: "at the end of a backward pass",
    Place.METRIC: "reducing a metric (self.log with sync_dist=True, or strategy.reduce)",
    Place.BARRIER: "at a barrier",
    Place.SAVE: "saving a checkpoint or collecting a full state dict",
    Place.GATHERED: "entering or leaving `with strategy.gathered(...)`",
    Place.LOADER: "asking the other ranks whether they have a next batch",
    Place.BROADCAST: "broadcasting an object",
    Place.SETUP: "setting up the strategy",
    Place.NORM: "computing a gradient norm",
    Place.REDUCE: "in a backward pass, waiting for a gradient reduction",
    Place.BATCH: "about to take the next batch",
    Place.REFRESH: "after an optimizer step, spreading updated parameters",
    Place.BUFFERS: "at the beginning of a step, synchronizing buffers",
    Place.STEP_END: "at the end of a step",
    Place.READ: "reading values of which each tensor-parallel rank holds a part",
    Place.AGREE: "checking that the ranks of a replica agree",
    Place.LOSS: "asking whether the loss is finite on all ranks",
}


@dataclass
class RollCall:
    """Announces places over all ranks of the world (or of an axis); always on the CPU, so no device stream waits.

    `help_gather` is called with the numbers of the units that other ranks ask for while this one waits. While it is
    `closed`, for the reason that this says, ranks cannot meet but to gather.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int
    ledger: Ledger
    help_gather: Callable[[list[int]], None] | None = None
    shared: SharedMemory | None = None
    watch: Watch | None = None
    closed: str = ""

    @classmethod
    def for_world(cls, backend: str, ledger: Ledger, terms: Terms | None = None) -> "RollCall":
        """A roll call over the default world. In a fake world nobody answers, so everyone is taken to agree.

        Args:
            terms: on which ranks may talk through shared memory, if they may.
        """
        size, rank = dist.get_world_size(), dist.get_rank()
        if size == 1 or backend == "fake":
            return cls(None, size, rank, ledger)
        return cls.over(dist.new_group(backend="gloo"), ledger, terms)

    @classmethod
    def over(cls, group: dist.ProcessGroup, ledger: Ledger, terms: Terms | None = None) -> "RollCall":
        """A roll call over the ranks of a gloo group."""
        shared = None if terms is None else SharedMemory.connect(group, terms)
        watch = None if terms is None else terms.watch
        return cls(group, group.size(), group.rank(), ledger, shared=shared, watch=watch)

    def ask(self, place: Place, answer: int = 0, *, what: str = "") -> list[int]:
        """Every rank's `answer`, in rank order, once all of them are at `place` (at GATHER: all units asked for).

        Args:
            what: words for the error message, such as a file name.

        Raises:
            RankMismatchError: some rank is elsewhere; raised on all of them.
            PeerLostError: a rank has died.
            ConfigurationError: it is closed; raised on this rank alone.
        """
        if self.group is None:
            return [answer] * self.size
        if self.closed and place is not Place.GATHER:
            raise ConfigurationError(f"This rank is {f'{place.words} {what}'.strip()}, but {self.closed}")
        while True:
            places, answers = self._hear(place, answer, what)
            if all(other == place for other in places):
                return answers
            wanted = {a for other, a in zip(places, answers, strict=True) if other == Place.GATHER}
            rest = {other for other in places if other != Place.GATHER}
            if not wanted or len(rest) > 1 or self.help_gather is None:
                self._disagree(place, what)
            if place is Place.GATHER:
                return sorted(wanted)
            self.help_gather(sorted(wanted))

    @contextmanager
    def closing(self, reason: str) -> Iterator[None]:
        """Within the block it is closed."""
        before, self.closed = self.closed, reason
        try:
            yield
        finally:
            self.closed = before

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """Element by element, whether any rank's flag is set. All ranks must be known to be here."""
        if self.group is None:
            return flags
        union = torch.tensor(flags, dtype=torch.uint8)
        self.ledger.record("world", "all_reduce", "rollcall", 2 * len(flags) * (self.size - 1) // self.size)
        if self.shared is not None:
            everyone = union.repeat(self.size)
            self.shared.all_gather(everyone).wait()
            return [bool(flag) for flag in everyone.view(self.size, -1).amax(0).tolist()]
        dist.all_reduce(union, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in union.tolist()]

    def exchange(self, obj: object) -> list[object]:
        """Every rank's picklable object, in rank order. All ranks must be known to be here."""
        if self.group is None:
            return [obj] * self.size
        if self.shared is None:
            return said_by_all(obj, self.group)
        mine = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = mine.numel()
        self.shared.all_gather(sizes).wait()
        parts = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
        self.shared.pieces(mine, parts).wait()
        return [pickle.loads(part.numpy().data) for part in parts]

    def meet(self, obj: object = None) -> list[object]:
        """As `exchange`, but never through shared memory: it works after a mesh was aborted."""
        return [obj] * self.size if self.group is None else said_by_all(obj, self.group)

    def broadcast(self, obj: object, source: int = 0) -> object:
        """The picklable object of one rank. All ranks must be known to be here."""
        if self.group is None:
            return obj
        said = self.exchange(obj if self.rank == source else None)[source]
        return obj if self.rank == source else said

    def _hear(self, place: Place, answer: int, what: str) -> tuple[list[int], list[int]]:
        mine = torch.tensor([int(place), answer], dtype=torch.int64)
        heard = torch.empty(2 * self.size, dtype=torch.int64)
        self.ledger.record("world", "all_gather", "rollcall", 16 * (self.size - 1))
        try:
            if self.shared is not None:
                heard[2 * self.rank : 2 * self.rank + 2] = mine
                with self._waiting_at(f"{place.words} {what}".strip()):
                    self.shared.all_gather(heard).wait()
            else:
                all_gather_single(heard, mine, group=self.group)
        except RankMismatchError:
            raise  # it says where all are
        except PeerLostError as error:
            raise PeerLostError(f"rank {self.rank} is {place.words} and {error}") from error
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank} stops {place.words}: another rank failed or died (see its own traceback)"
            ) from error
        return heard[0::2].tolist(), heard[1::2].tolist()

    @contextmanager
    def _waiting_at(self, words: str) -> Iterator[None]:
        """Where this rank says it is, should others ask; see `watch`."""
        if self.watch is None:
            yield
            return
        self.watch.place = words
        try:
            yield
        finally:
            self.watch.place = ""

    def call(self, place: Place, detail: int = 0, *, what: str = "") -> None:
        """Insist that all ranks are at the same place with the same `detail`.

        Raises:
            RankMismatchError: some rank is elsewhere, or says another detail; raised on all of them.
        """
        if len(set(self.ask(place, detail, what=what))) > 1:
            self._disagree(place, f"{what} (its number here: {detail})".strip())

    def _disagree(self, place: Place, what: str) -> NoReturn:
        said = self.exchange(f"{place.words} {what}".strip())
        lines = "\n".join(f"  rank {rank} is {words}" for rank, words in enumerate(said))
        raise RankMismatchError(
            "The ranks are not in the same place, so going on would hang or mix up numbers:\n"
            f"{lines}\n"
            "Whatever communicates (training and validation steps, save_checkpoint, state_dict, self.log with "
            "sync_dist=True, gathered) must be called on all ranks; remove conditions such as `if rank == 0:`."
        )
