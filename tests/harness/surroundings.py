"""The process-wide state a test may disturb, and the way back.

A pool serves many tests with the same processes; whatever a test sets globally (default dtype, random
numbers, environment variables, working directory) would leak into the next one. Each worker records these
before the first test of a module, and restores them after every test.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SEED = 20_061


def seed_everything(seed: int = SEED) -> None:
    """Give torch, numpy and random the same start on every rank and in every test."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # a test has removed the directory it went to
        return ""


def _restore_environment(recorded: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(recorded)


def _restore_filters(recorded: list[Any]) -> None:
    warnings.filters[:] = recorded  # type: ignore[index]


def _restore_search_path(recorded: list[str]) -> None:
    sys.path[:] = recorded


# Compared before they are set: some setters are slow (use_deterministic_algorithms imports the compiler).
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, lambda _: torch.set_default_device(None)),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "determinism": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "environment": (lambda: dict(os.environ), _restore_environment),
    "directory": (_directory, os.chdir),
    "search path": (lambda: list(sys.path), _restore_search_path),
    "warning filters": (lambda: list(warnings.filters), _restore_filters),
}


@dataclass(frozen=True)
class Surroundings:
    """A snapshot of global state."""

    settings: dict[str, Any]
    torch_random: torch.Tensor
    numpy_random: Any
    python_random: Any

    @classmethod
    def capture(cls) -> Surroundings:
        settings = {name: read() for name, (read, _) in _SETTINGS.items()}
        return cls(settings, torch.get_rng_state(), np.random.get_state(), random.getstate())

    def restore(self) -> None:
        for name, (read, write) in _SETTINGS.items():
            if read() != self.settings[name]:
                write(self.settings[name])
        torch.set_rng_state(self.torch_random)
        np.random.set_state(self.numpy_random)
        random.setstate(self.python_random)
