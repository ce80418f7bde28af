"""Where one worker stands: its rank, and the files through which it can be read from outside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """The ranks of one pool share a directory."""

    rank: int
    world: int
    directory: Path

    @property
    def store(self) -> Path:
        return self.directory / "store"

    @property
    def log(self) -> Path:
        return self.directory / f"output{self.rank}"

    @property
    def stacks(self) -> Path:
        return self.directory / f"stacks{self.rank}"
