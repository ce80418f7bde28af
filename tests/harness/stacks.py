"""The Python stack of a worker, asked for from outside.

A worker blocked in a collective cannot answer, but faulthandler can: on SIGUSR1 it writes the stack of
every thread to a file, without needing the interpreter. What it writes:

    Thread 0x00007f2d (most recent call first):
      File "/path/module.py", line 12 in function
      ...
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PATIENCE_SECONDS = 3.0
_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_HARNESS = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True)
class Stack:
    """The stacks of one worker's threads as text, without the frames of the harness itself."""

    text: str

    def position(self) -> str:
        """The innermost frame outside installed packages: the line of the test or of the library."""
        frames = list(_FRAME.finditer(self.text))
        ours = [frame for frame in frames if "site-packages" not in frame["path"]] or frames
        if not ours:
            return "an unknown place"
        return f"{ours[0]['path']}:{ours[0]['line']} in {ours[0]['function']}"


def ask_for_stack(pid: int, file: Path) -> Stack:
    """Send the signal and wait until the file has grown and stands still."""
    before = _size(file)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    give_up, previous = time.monotonic() + PATIENCE_SECONDS, -1
    while time.monotonic() < give_up:
        size = _size(file)
        if size > before and size == previous:
            break
        previous = size
        time.sleep(0.02)
    with suppress(OSError), file.open() as stream:
        stream.seek(before)
        return Stack(_without_harness(stream.read()))
    return Stack("  (no stack could be read)")


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _without_harness(dump: str) -> str:
    """Drop the watching thread, and in the main thread what lies below the test."""
    threads = []
    for thread in re.split(r"\n(?=(?:Current thread|Thread) 0x)", dump.strip("\n")):
        if not thread.strip():
            continue  # the process was too busy to write its stack in time
        title, *frames = thread.splitlines()
        ours = next((i for i, frame in enumerate(frames) if _HARNESS in frame), len(frames))
        watching = ours == 0 and "_die_with" in thread
        if not watching:
            threads.append("\n".join([title, *(frames[:ours] or ["  (waiting for the next request)"])]))
    return "\n\n".join(threads)
