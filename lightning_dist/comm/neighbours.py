"""The processes of one machine: which they are, and sockets between them for what only those carry, open files."""

import os
import platform
import socket
import uuid
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

PATIENCE = 60.0


@dataclass(eq=False)
class Neighbours:
    """One socket to every other rank of a group; closed when this object goes."""

    rank: int
    sockets: dict[int, socket.socket]

    @classmethod
    def meet(cls, rank: int, size: int, exchange: Callable[[object], list[object]]) -> "Neighbours":
        """Connect every pair of ranks. Collective; `exchange` gives every rank's object in rank order.

        Raises:
            OSError: a rank cannot be reached, as from another network namespace.
        """
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"\0lightning_dist-{uuid.uuid4().hex}")  # an abstract name: no file
            door.listen(size)
            door.settimeout(PATIENCE)
            names = exchange(door.getsockname())
            met: dict[int, socket.socket] = {}
            try:
                for peer in range(rank):
                    met[peer] = socket.socket(socket.AF_UNIX)
                    met[peer].connect(names[peer])  # type: ignore[arg-type]
                    met[peer].sendall(rank.to_bytes(4, "little"))
                for _ in range(rank + 1, size):
                    caller, _ = door.accept()
                    met[int.from_bytes(caller.recv(4, socket.MSG_WAITALL), "little")] = caller
            except OSError:
                _close(met)
                raise
        neighbours = cls(rank, met)
        weakref.finalize(neighbours, _close, met)
        return neighbours

    def send_handle(self, handle: int, peers: Iterable[int] | None = None) -> None:
        """To some ranks, or to every other. What a rank that has gone does not take is lost with it."""
        for peer in self.sockets if peers is None else peers:
            try:
                socket.send_fds(self.sockets[peer], [b"h"], [handle])
            except (BrokenPipeError, ConnectionResetError):
                continue

    def receive_handle(self, peer: int) -> int:
        """The next one that a rank has sent, to be closed by the caller.

        Raises:
            OSError: the rank has gone without sending one.
        """
        _, handles, _, _ = socket.recv_fds(self.sockets[peer], 1, 1)
        if not handles:
            raise ConnectionResetError(f"rank {peer} has gone")
        return handles[0]

    def share(self, make: Callable[[], int]) -> int:
        """One handle for all ranks, made by the first of them; to be closed by the caller. Collective."""
        if self.rank:
            return self.receive_handle(0)
        handle = make()
        self.send_handle(handle)
        return handle


def said_by_all(mine: object, group: dist.ProcessGroup) -> list[object]:
    """Every rank's picklable object, in rank order; over gloo. Collective."""
    said: list[object] = [None] * group.size()
    dist.all_gather_object(said, mine, group=group)
    return said


def machine() -> str | None:
    """Names this machine as far as memory is concerned; None where shared memory cannot be used."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    usable = hasattr(os, "memfd_create") and platform.machine() in ("x86_64", "AMD64")
    return f"{boot} {space}" if usable else None


def alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _close(sockets: dict[int, socket.socket]) -> None:
    for one in sockets.values():
        one.close()
