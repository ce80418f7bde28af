"""Sockets between the processes of one machine, for what only they can carry: handles of open files."""

import socket
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass

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

    def send_handle(self, handle: int) -> None:
        """To every other rank. What a rank that has gone does not take is lost with it."""
        for peer in self.sockets.values():
            try:
                socket.send_fds(peer, [b"h"], [handle])
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


def _close(sockets: dict[int, socket.socket]) -> None:
    for one in sockets.values():
        one.close()
