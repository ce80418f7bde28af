"""The process that workers are forked from.

Importing torch takes seconds of CPU time, and a pool of four needs it four times, again after every failed
test. The template pays once: it imports what workers will need, installs pytest's assertion rewriting, and
then only forks.

    control socket (one packet per message, JSON):
        pytest -> template   {"preload": [module, ...]}                first of all
                             {"rank": r, "world": n, "directory": d}   with the worker's end of a connection
        template -> pytest   {"ready": pid}                            when all is imported
                             {"forked": pid}                           after each fork
                             {"exited": pid, "status": wait status}    whenever a worker has ended

It never starts a thread and never runs a backward pass: a process may be forked safely only as long as it
has one thread, and autograd refuses to run in the child of a process that has used its threads.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Iterable
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.harness.environment import REPOSITORY
from tests.harness.place import Place
from tests.harness.worker import live

PACKET_BYTES = 1 << 16
EXPLANATION_LINES = 25


class Template:
    """Forks workers on request and reports their exits."""

    def __init__(self, control: socket.socket, pytest_pidfd: int) -> None:
        self._control = control
        self._pytest_pidfd = pytest_pidfd
        self._wakeup, wakeup_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler is needed for the wakeup pipe to be written
        signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
        self._wakeup_end = wakeup_end

    def serve(self) -> None:
        control = self._control.fileno()
        while True:
            ready, _, _ = select.select([control, self._wakeup, self._pytest_pidfd], [], [])
            if self._pytest_pidfd in ready:
                return  # workers watch pytest themselves
            if self._wakeup in ready:
                self._report_exits()
            if control in ready:
                packet, handles, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
                if not packet:
                    return
                self._obey(json.loads(packet), handles)

    def _obey(self, message: dict[str, Any], handles: list[int]) -> None:
        if "preload" in message:
            _preload(message["preload"])
            self._send(ready=os.getpid())
            return
        place = Place(message["rank"], message["world"], Path(message["directory"]))
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise RuntimeError(f"the template has {threads} threads, forking it is not safe; a preload started them")
        pid = os.fork()
        if pid == 0:
            self._become_worker(place, handles[0])
        os.close(handles[0])
        self._send(forked=pid)

    def _become_worker(self, place: Place, handle: int) -> None:
        status = 1
        try:
            os.setsid()  # one process group per worker: killing it takes along whatever the test started
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._wakeup, self._wakeup_end):
                os.close(inherited)
            self._control.close()
            log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            live(place, Connection(handle), self._pytest_pidfd)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _report_exits(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup, 4096):
                pass
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._send(exited=pid, status=status)

    def _send(self, **message: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._control.send(json.dumps(message).encode())


def _preload(modules: Iterable[str]) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # only a loss of time: the test that needs the module reports why it cannot be imported
            traceback.print_exc()
    gc.collect()
    gc.freeze()  # the children collect garbage after every test; what was made here is none of it


class _ServeInsteadOfTesting:
    """A pytest plugin: once pytest is configured (rewriting hook included), serve instead of testing."""

    def __init__(self, control: socket.socket, pytest_pidfd: int) -> None:
        self._control = control
        self._pytest_pidfd = pytest_pidfd

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the harness itself is imported already and needs no rewriting
            pytest.register_assert_rewrite("tests")
        _explain_comparisons(config)
        Template(self._control, self._pytest_pidfd).serve()
        return 0


def _explain_comparisons(config: pytest.Config) -> None:
    """Let ``assert a == b`` show the difference, which pytest sets up per test item; there is none here."""
    from _pytest.assertion import util

    def explain(op: str, left: object, right: object) -> str | None:
        for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
            shown = [line.replace("\n", "\\n") for line in islice(lines or (), EXPLANATION_LINES)]
            if shown:
                return "\n~".join(shown).replace("%", "%%")
        return None

    util._reprcompare = explain


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    pytest_pidfd = os.pidfd_open(int(sys.argv[2]))
    pytest.main(
        [
            "-c",
            os.devnull,
            "--rootdir",
            str(REPOSITORY),
            "--noconftest",
            "-p",
            "no:cacheprovider",
            "-s",
            "-v",
        ],
        plugins=[_ServeInsteadOfTesting(control, pytest_pidfd)],
    )


if __name__ == "__main__":
    main()
