"""Run a Python script the way a user does, and account for every process it started.

`Trainer(devices=2)` starts further processes from the script itself, so such a test needs a real file and a
real command line. The questions that matter afterwards: how did it end, what did it print, how long did it
take, and is any process of it still there?
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.harness.environment import REPOSITORY, clean_environment

TOKEN_VARIABLE = "LIGHTNING_DIST_TEST_TOKEN"
WORLD_VARIABLE = "SCRIPT_WORLD"
STACK_SECONDS = 1.0
KILL_SECONDS = 5.0


@dataclass(frozen=True)
class Survivor:
    """A process that was started by a script and outlived it."""

    pid: int
    command: str


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended. A negative exit code is minus the signal that killed it, as in `subprocess`."""

    output: str
    returncode: int
    seconds: float
    survivors: tuple[Survivor, ...]
    timed_out: bool


class ScriptFailure(AssertionError):
    """A script did not end as the test expected; the message holds all it printed."""

    def __init__(self, what: str, result: ScriptResult) -> None:
        super().__init__(f"{what}\nafter {result.seconds:.1f} s; it printed:\n{textwrap.indent(result.output, '  ')}")
        self.result = result


def run_script(
    source_or_path: str | Path,
    *args: str,
    world: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    expect: int | None = 0,
    directory: Path | None = None,
    interpreter_args: Sequence[str] = (),
    linger: float = 5.0,
) -> ScriptResult:
    """Run ``python script.py *args`` in its own directory and wait for it.

    Args:
        source_or_path: A string is the source of the script, which may be indented; a `Path` is a script.
        args: Command line arguments.
        world: Handed to the script as environment variable ``SCRIPT_WORLD``, for ``Trainer(devices=...)``.
        env: Variables set on top of a clean environment: no launcher variables, one thread, gloo on loopback,
            and a PYTHONPATH of the repository and the script's directory.
        timeout: Seconds; then every process of the script prints its Python stack and is killed.
        expect: The exit code the test demands; None leaves the judgement, of a timeout too, to the test.
        directory: Where the script is written and runs; kept. Default: a temporary directory, removed.
        interpreter_args: Arguments before the script, as ``("-m", "torch.distributed.run", "--standalone")``.
        linger: Seconds that other processes of the script may take to end after it has ended.

    Raises:
        ScriptFailure: Another exit code than ``expect``, or a timeout.
    """
    with ExitStack() as stack:
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="script-")))
        script = _as_file(source_or_path, directory)
        token = uuid.uuid4().hex
        environment = clean_environment([REPOSITORY, directory])
        environment |= {TOKEN_VARIABLE: token, "PYTHONFAULTHANDLER": "1"} | dict(env or {})
        if world is not None:
            environment[WORLD_VARIABLE] = str(world)
        command = [sys.executable, *interpreter_args, str(script), *args]
        result = _run(command, directory, environment, token, timeout, linger)
    if expect is not None and result.timed_out:
        raise ScriptFailure(f"{script.name} did not end within {timeout:g} s", result)
    if expect is not None and result.returncode != expect:
        raise ScriptFailure(f"{script.name} ended with exit code {result.returncode}, not {expect}", result)
    return result


def _as_file(source_or_path: str | Path, directory: Path) -> Path:
    if isinstance(source_or_path, Path):
        return source_or_path.resolve()
    script = directory / "script.py"
    script.write_text(textwrap.dedent(source_or_path))
    return script


def _run(
    command: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    token: str,
    timeout: float,
    linger: float,
) -> ScriptResult:
    with tempfile.TemporaryFile() as output:  # not a pipe: a survivor would hold it open
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            timed_out = not _ends(process, timeout)
            seconds = time.monotonic() - start
            if timed_out:
                _print_stacks(token)
                survivors: tuple[Survivor, ...] = ()
            else:
                survivors = _outliving(token, linger)
        finally:
            _kill_all(process, token)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return ScriptResult(text, process.returncode, seconds, survivors, timed_out)


def _ends(process: subprocess.Popen[bytes], timeout: float) -> bool:
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    return True


def _outliving(token: str, linger: float) -> tuple[Survivor, ...]:
    give_up = time.monotonic() + linger
    while True:
        found = tuple(_processes_of(token))
        if not found or time.monotonic() > give_up:
            return found
        time.sleep(0.05)


def _print_stacks(token: str) -> None:
    """SIGABRT makes Python print its stacks and end; a core file is not wanted."""
    for process in _processes_of(token):
        with suppress(OSError):
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
            os.kill(process.pid, signal.SIGABRT)
    give_up = time.monotonic() + STACK_SECONDS
    while time.monotonic() < give_up and any(_processes_of(token)):
        time.sleep(0.05)


def _kill_all(process: subprocess.Popen[bytes], token: str) -> None:
    """End the script's process group and all others that carry its token, until none is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    give_up = time.monotonic() + KILL_SECONDS
    while time.monotonic() < give_up:
        left = list(_processes_of(token))
        if not left:
            return
        for survivor in left:
            with suppress(ProcessLookupError):
                os.kill(survivor.pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes_of(token: str) -> Iterator[Survivor]:
    """Living processes that inherited the script's environment, whatever process group they are in by now."""
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it may end while we look, or belong to somebody else
            if mark in (entry / "environ").read_bytes().split(b"\0") and not _is_zombie(entry):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                yield Survivor(int(entry.name), command)


def _is_zombie(entry: Path) -> bool:
    after_name = (entry / "stat").read_text(errors="replace").rpartition(")")[2]  # "pid (name) state ..."
    return after_name.split()[0] == "Z"
