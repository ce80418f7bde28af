"""One rank: joins the default process group once, then answers requests until pytest goes away.

Runs in a process forked from the template (see ``template``), so torch, pytest and the assertion rewriting
hook are in place already. The main thread serves; a second thread waits for the death of pytest and then
ends this process and all it started, whatever the main thread is blocked in.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tests.harness.messages import (
    BODY_ATTRIBUTE,
    Kind,
    LocalMonkeyPatch,
    Outcome,
    Prepare,
    Request,
    Run,
    Tidy,
)
from tests.harness.place import Place
from tests.harness.surroundings import Surroundings, seed_everything

HEADLINE_WIDTH = 200

_Entries = TypeVar("_Entries", bound=list[Any])


class Worker:
    """The serving loop of one rank."""

    def __init__(self, place: Place, connection: Connection) -> None:
        self._place = place
        self._connection = connection
        self._surroundings = Surroundings.capture()

    def serve(self) -> None:
        """Answer one request after another; returns when pytest closes its end."""
        while True:
            try:
                request: Request = self._connection.recv()
            except (EOFError, OSError):
                return
            outcome = self._answer(request)
            sys.stdout.flush()
            sys.stderr.flush()
            self._connection.send(outcome)

    def _answer(self, request: Request) -> Outcome:
        try:
            match request:
                case Prepare():
                    value = self._prepare(request)
                case Run():
                    value = self._run(request)
                case Tidy():
                    value = self._tidy(request)
        except pytest.skip.Exception as skipped:
            return self._outcome(Kind.SKIPPED, headline=str(skipped), text=str(skipped))
        except pytest.xfail.Exception as expected:
            return self._outcome(Kind.XFAILED, headline=str(expected), text=str(expected))
        except BaseException as error:  # SystemExit and KeyboardInterrupt in a body are failures of that body too
            return self._outcome(Kind.FAILED, headline=_headline(error), text=_traceback(error))
        return self._outcome(Kind.PASSED, value=value)

    def _outcome(self, kind: Kind, *, headline: str = "", text: str = "", value: bytes = b"") -> Outcome:
        return Outcome(self._place.rank, kind, time.monotonic(), headline, text, value)

    def _prepare(self, request: Prepare) -> bytes:
        sys.path[:] = request.search_path
        importlib.import_module(request.module)
        self._surroundings = Surroundings.capture()
        gc.collect()
        gc.freeze()  # what the imports made stays for good: keep the collection after every test short
        return b""

    def _run(self, request: Run) -> bytes:
        module: Any = sys.modules[request.module]
        found = reduce(getattr, request.qualname.split("."), module)
        body: Callable[..., object] = getattr(found, BODY_ATTRIBUTE, found)
        arguments: dict[str, Any] = pickle.loads(request.arguments)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in arguments.items():
                if isinstance(value, LocalMonkeyPatch):
                    arguments[name] = patch
            seed_everything()
            return pickle.dumps(body(**arguments))

    def _tidy(self, request: Tidy) -> bytes:
        if not dist.is_initialized():
            raise RuntimeError("the test destroyed the default process group, which later tests need")
        self._surroundings.restore()
        _check_pulse(request.turn)
        made_by_test = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
        for group in made_by_test:  # sockets and threads of forgotten groups would pile up over a test run
            dist.destroy_process_group(group)
        gc.collect()
        return pickle.dumps(dist.distributed_c10d._world.group_count)


def _check_pulse(turn: int) -> None:
    """One tiny collective with a known result: wrong or stuck if the test left one without its partners."""
    turns = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(turns, torch.tensor([turn]))
    if any(int(other) != turn for other in turns):
        raise RuntimeError(f"the default process group is out of step: expected turn {turn} everywhere, got {turns}")


def _headline(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"[:HEADLINE_WIDTH]


def _traceback(error: BaseException) -> str:
    """The traceback as pytest prints it: from the body on, the first and last frame with their source."""
    try:
        info = pytest.ExceptionInfo.from_exception(error)
        text = str(info.getrepr(style="long", tbfilter=_frames_of_interest))
    except Exception:  # an exception whose own repr raises still has to be reported
        return "".join(traceback.format_exception(error))
    return text if text.startswith((">", "E ")) else f"    {text}"  # str() strips the first line's indentation


def _frames_of_interest(info: pytest.ExceptionInfo[BaseException]) -> Any:
    everything = info.traceback
    harness = os.path.dirname(__file__)
    entries = [entry for entry in everything if not str(entry.path).startswith(harness)]
    visible = [entry for entry in entries if not entry.ishidden(info)] or entries or list(everything)
    shortened = [entry.with_repr_style("short") for entry in visible[1:-1]]
    return _like(everything, [visible[0], *shortened, visible[-1]] if len(visible) > 1 else visible)


def _like(original: _Entries, entries: list[Any]) -> _Entries:
    return type(original)(entries)


def live(place: Place, connection: Connection, pytest_pidfd: int) -> None:
    """The whole life of a worker, in a freshly forked process."""
    threading.Thread(target=_die_with, args=(pytest_pidfd,), daemon=True).start()
    with place.stacks.open("w") as stacks:
        faulthandler.enable(sys.stderr)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=FileStore(str(place.store), place.world),
            rank=place.rank,
            world_size=place.world,
        )
        connection.send(Outcome(place.rank, Kind.PASSED, time.monotonic()))
        Worker(place, connection).serve()


def _die_with(pidfd: int) -> None:
    select.select([pidfd], [], [])  # a pidfd becomes readable when its process ends
    os.killpg(0, signal.SIGKILL)
