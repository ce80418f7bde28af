"""Pytest's side: start workers, put requests to all of them at once, give up on them in time.

`Pools` is what tests use. It keeps one `Pool` per world size, each of them one set of worker processes with
one default process group, and replaces a pool that has seen a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from tests.harness.environment import REPOSITORY, clean_environment
from tests.harness.messages import LocalMonkeyPatch, Outcome, Prepare, Request, Run, Tidy
from tests.harness.place import Place
from tests.harness.stacks import ask_for_stack
from tests.harness.verdict import LOG_LINES, Cause, Death, RankFailure, Round

DEFAULT_TIMEOUT = 240.0  # for hangs, not for slow machines
START_SECONDS = 180.0
TIDY_SECONDS = 120.0
GRACE_SECONDS = 1.0  # how long after the first failure the other ranks may still report theirs
EXIT_SECONDS = 10.0
SHARED_IMPORTS = ("lightning", "peft", "transformers")


class HarnessError(Exception):
    """The harness itself could not do its work; the test is not to blame."""


class TemplateClient:
    """Pytest's end of the process that forks workers (see ``template`` for the messages)."""

    def __init__(self, preload: Iterable[str]) -> None:
        self._statuses: dict[int, int] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-template-"))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        with theirs, (self._directory / "output").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.template", str(theirs.fileno()), str(os.getpid())],
                cwd=REPOSITORY,
                env=clean_environment([REPOSITORY]) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            self.control.send(json.dumps({"preload": list(preload)}).encode())
            self._next_message("ready", START_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, place: Place) -> tuple[int, Connection]:
        """Start one worker; returns its pid and the connection it listens to."""
        ours, theirs = Pipe()
        with theirs:
            request = {"rank": place.rank, "world": place.world, "directory": str(place.directory)}
            socket.send_fds(self.control, [json.dumps(request).encode()], [theirs.fileno()])
            return self._next_message("forked", START_SECONDS), ours

    def status(self, pid: int, timeout: float = 0.0) -> int | None:
        """The wait status of a worker that has ended within ``timeout``, else None."""
        give_up = time.monotonic() + timeout
        while pid not in self._statuses:
            if not self._readable(give_up - time.monotonic()):
                return None
            self._receive()
        return self._statuses[pid]

    def receive_pending(self) -> None:
        """Take note of all exits reported so far."""
        while self._readable(0.0):
            self._receive()

    def close(self) -> None:
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _next_message(self, key: str, timeout: float) -> int:
        give_up = time.monotonic() + timeout
        while True:
            if not self._readable(give_up - time.monotonic()):
                raise HarnessError(f"no '{key}' from the template after {timeout:g} s; it printed:\n{self._log()}")
            message = self._receive()
            if key in message:
                return message[key]

    def _readable(self, timeout: float) -> bool:
        ready, _, _ = select.select([self.control], [], [], max(0.0, timeout))
        return bool(ready)

    def _receive(self) -> dict[str, int]:
        try:
            packet = self.control.recv(1 << 16)
        except ConnectionResetError:
            packet = b""
        if not packet:
            raise HarnessError(f"the template has ended; it printed:\n{self._log()}")
        message: dict[str, int] = json.loads(packet)
        if "exited" in message:
            self._statuses[message["exited"]] = message["status"]
        return message

    def _log(self) -> str:
        return (self._directory / "output").read_text(errors="replace")


@dataclass
class WorkerClient:
    """Pytest's end of one worker."""

    place: Place
    pid: int
    connection: Connection
    printed: int = 0

    def last_answer(self) -> Outcome | None:
        """What a worker said before it ended, if anything; without waiting, for orphans may hold the line."""
        try:
            answer: Outcome | None = self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):
            return None
        return answer

    def new_output(self) -> str:
        """What the worker has printed since the last call."""
        try:
            with self.place.log.open(errors="replace") as log:
                log.seek(self.printed)
                text = log.read()
                self.printed = log.tell()
                return text
        except FileNotFoundError:
            return ""


class Pool:
    """The workers of one world size."""

    def __init__(self, template: TemplateClient, world: int) -> None:
        self.world = world
        self._template = template
        self._directory = Path(tempfile.mkdtemp(prefix=f"ranks-{world}-"))
        self._prepared: set[str] = set()
        self._turn = 0
        self._workers: list[WorkerClient] = []
        self.healthy = True
        try:
            for rank in range(world):
                place = Place(rank, world, self._directory)
                self._workers.append(WorkerClient(place, *template.fork(place)))
            self._collect(START_SECONDS).conclude(START_SECONDS)
        except BaseException as error:
            self.kill()
            if isinstance(error, RankFailure):
                raise HarnessError(f"the pool of {world} did not start: {error}") from None
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    @property
    def alive(self) -> bool:
        return self.healthy and all(self._template.status(pid) is None for pid in self.pids)

    def run(self, body: Callable[..., object], timeout: float, arguments: bytes) -> list[object]:
        """Run ``body`` on every rank and return what each returned; see `Pools.run`."""
        module, qualname = body.__module__, body.__qualname__
        self.healthy = False  # until proven otherwise: also when the wait is interrupted from the keyboard
        try:
            if module not in self._prepared:
                self._ask(Prepare(module, tuple(sys.path)), START_SECONDS, " while importing the test's module")
                self._prepared.add(module)
            outcomes = self._ask(Run(module, qualname, arguments), timeout, "")
        except (pytest.skip.Exception, pytest.xfail.Exception):
            self._tidy()
            raise
        self._tidy()
        return [pickle.loads(outcomes[rank].value) for rank in range(self.world)]

    def kill(self) -> None:
        """End all workers and all they started, and wait until they are gone."""
        self.healthy = False
        for worker in self._workers:
            for end in (
                os.killpg,
                os.kill,
            ):  # the group does not exist yet in the first moment of a worker's life
                with contextlib.suppress(ProcessLookupError):
                    end(worker.pid, signal.SIGKILL)
            worker.connection.close()
        for worker in self._workers:
            with contextlib.suppress(HarnessError, OSError):
                self._template.status(worker.pid, EXIT_SECONDS)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _tidy(self) -> None:
        self._turn += 1
        try:
            outcomes = self._ask(Tidy(self._turn), TIDY_SECONDS, "")
        except RankFailure as failure:
            told = "the test passed on every rank but left the default process group unusable, perhaps by a "
            told += "collective in which some rank did not take part"
            raise RankFailure(Cause.LEFT_BROKEN, failure.rank, f"{told}\n\n{failure}") from None
        groups_made = {outcome.value for outcome in outcomes.values()}
        self.healthy = len(groups_made) == 1  # else the names of later groups would differ between ranks

    def _ask(self, request: Request, timeout: float, place: str) -> dict[int, Outcome]:
        for worker in self._workers:
            with contextlib.suppress(OSError):  # that it has died is found out below, with its exit code
                worker.connection.send(request)
        result = self._collect(timeout)
        self._repeat_output()
        result.conclude(timeout, place=place)
        return result.outcomes

    def _collect(self, timeout: float) -> Round:
        """Wait for the answer or the death of every worker; after a failure only a little longer."""
        result = Round(self.world)
        give_up = time.monotonic() + timeout
        listening = [worker.connection for worker in self._workers]
        while result.pending:
            remaining = give_up - time.monotonic()
            if remaining <= 0:
                break
            ready = wait([*listening, self._template.control], remaining)
            if self._template.control in ready:
                self._note_deaths(result)
            for connection in [connection for connection in listening if connection in ready]:
                listening.remove(connection)
                with contextlib.suppress(EOFError, OSError):  # it has ended: the template will say how
                    outcome: Outcome = connection.recv()
                    result.outcomes[outcome.rank] = outcome
            if result.in_trouble:
                give_up = min(give_up, time.monotonic() + GRACE_SECONDS)
        for rank in result.pending:
            worker = self._workers[rank]
            result.stuck[rank] = ask_for_stack(worker.pid, worker.place.stacks)
        return result

    def _note_deaths(self, result: Round) -> None:
        self._template.receive_pending()
        for rank in result.pending:
            worker = self._workers[rank]
            status = self._template.status(worker.pid)
            if status is None:
                continue
            answer = worker.last_answer()
            if answer is not None:
                result.outcomes[rank] = answer
            else:
                log = "".join(worker.new_output().splitlines(keepends=True)[-LOG_LINES:])
                result.deaths[rank] = Death(time.monotonic(), status, log)

    def _repeat_output(self) -> None:
        """Print what the workers printed, so that pytest shows it as the output of the test."""
        for worker in self._workers:
            for line in worker.new_output().splitlines():
                print(f"[rank {worker.place.rank}] {line}")


class Pools:
    """One pool per world size, started when first needed and replaced after a failure."""

    def __init__(self, preload: Iterable[str] = ()) -> None:
        self._preload = tuple(preload)
        self._template: TemplateClient | None = None
        self._pools: dict[int, Pool] = {}

    def run(
        self,
        body: Callable[..., object],
        world: int,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        arguments: Mapping[str, object] | None = None,
    ) -> list[object]:
        """Run ``body(**arguments)`` on ``world`` ranks at once.

        Args:
            body: A function at the top of an importable module; the workers find it by name.
            world: Number of ranks.
            timeout: Seconds for the body alone; starting the pool and importing the module do not count.
            arguments: Keyword arguments, the same for every rank; picklable, or pytest's ``monkeypatch``,
                of which each rank then gets one of its own.

        Returns:
            What the body returned on each rank, in the order of ranks; it has to be picklable.

        Raises:
            RankFailure: Some rank raised, died, or did not finish in time.
            pytest.skip.Exception: All ranks skipped.
            HarnessError: The workers could not be started.
        """
        pickled = _pickle_arguments(arguments or {})
        pool = self._pool(world)
        try:
            return pool.run(body, timeout, pickled)
        finally:
            if not pool.healthy:
                self._drop(world)

    def pids(self, world: int) -> list[int]:
        """The processes that serve this world size now (none before its first test)."""
        return self._pools[world].pids if world in self._pools else []

    def close(self) -> None:
        for world in list(self._pools):
            self._drop(world)
        if self._template is not None:
            self._template.close()
            self._template = None

    def _pool(self, world: int) -> Pool:
        if self._template is not None and not self._template.alive:
            self.close()
        if world in self._pools and not self._pools[world].alive:
            self._drop(world)
        if world not in self._pools:
            if self._template is None:
                imported_here = [name for name in SHARED_IMPORTS if name in sys.modules]
                self._template = TemplateClient([*imported_here, *self._preload])
            self._pools[world] = Pool(self._template, world)
        return self._pools[world]

    def _drop(self, world: int) -> None:
        self._pools.pop(world).kill()


def _pickle_arguments(arguments: Mapping[str, object]) -> bytes:
    travelling = {
        name: LocalMonkeyPatch() if isinstance(value, pytest.MonkeyPatch) else value
        for name, value in arguments.items()
    }
    for name, value in travelling.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise HarnessError(
                f"argument '{name}' of type {type(value).__name__} cannot be sent to the worker processes "
                f"({error}); use a picklable value, such as a name that the test looks up in a table"
            ) from error
    return pickle.dumps(travelling)
