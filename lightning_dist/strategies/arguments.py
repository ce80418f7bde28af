"""What each argument of a strategy takes: one table, looked up by name when a strategy is constructed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision

from lightning_dist.core.errors import ConfigurationError
from lightning_dist.pipeline.homes import PLACES
from lightning_dist.pipeline.schedule import Action

Fits = Callable[[object], bool]
LONGEST = 200
"""Characters of a wrong value that are shown."""


@dataclass(frozen=True)
class Takes:
    """What an argument takes, as a test and in words that follow "is not"."""

    fits: Fits
    words: str


def insist(**given: object) -> None:
    """Insist that arguments have values that they can take.

    Raises:
        ConfigurationError: one has not; it names the argument and what it takes.
    """
    for name, value in given.items():
        takes = TABLE[name]
        if not takes.fits(value):
            raise ConfigurationError(f"{name}={repr(value)[:LONGEST]} is not {takes.words}")


def _count(least: int) -> Fits:
    return lambda value: type(value) is int and value >= least


def _maybe(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


def _kind(*kinds: type) -> Fits:
    return lambda value: isinstance(value, kinds)


def _list_of(fits: Fits) -> Fits:
    return lambda value: (
        isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0 and all(map(fits, value))
    )


def _names_to(fits: Fits) -> Fits:
    return lambda value: (
        isinstance(value, Mapping) and all(isinstance(name, str) and fits(said) for name, said in value.items())
    )


def _either(*ways: Fits) -> Fits:
    return lambda value: any(fits(value) for fits in ways)


def _one_of(*allowed: str) -> Takes:
    return Takes(lambda value: isinstance(value, str) and value in allowed, " or ".join(map(repr, allowed)))


def _lightnings(kind: type) -> Takes:
    return Takes(_maybe(_kind(kind)), f"a {kind.__name__} of lightning.pytorch, or None")


_TEXT: Fits = lambda value: isinstance(value, str) and bool(value)  # noqa: E731
_FLAG = Takes(_kind(bool), "True or False")
_RANKS = Takes(_maybe(_count(1)), "a number of ranks; use 1 or more, or None")
_STAGE = Takes(lambda value: type(value) is int and 0 <= value <= 3, "a ZeRO stage; use 0, 1, 2 or 3")

TABLE: dict[str, Takes] = {
    "accelerator": _lightnings(Accelerator),
    "parallel_devices": Takes(_maybe(_list_of(_kind(torch.device))), "a list of torch.device, or None"),
    "cluster_environment": _lightnings(ClusterEnvironment),
    "checkpoint_io": _lightnings(CheckpointIO),
    "precision_plugin": _lightnings(Precision),
    "start_method": _one_of("popen", "spawn", "fork", "forkserver"),
    "process_group_backend": Takes(_maybe(_TEXT), 'the name of a backend; use "gloo", "nccl" or None'),
    "timeout": Takes(
        lambda value: isinstance(value, timedelta) and value > timedelta(0),
        "a time to wait; use datetime.timedelta(minutes=...), more than 0",
    ),
    "keep_freed_memory": _FLAG,
    "master_weights": _FLAG,
    "on_nonfinite": _one_of("error", "skip", "ignore"),
    "on_uneven": _one_of("stop", "error"),
    "checkpoint_format": _one_of("full"),
    "check_replicas_every": Takes(_count(0), "a number of optimizer steps; use 0 (never) or more"),
    "stage": _STAGE,
    "zero": _STAGE,
    "accumulate": _one_of("shard", "local"),
    "prefetch_bytes": Takes(_maybe(_count(0)), "a number of bytes; use 0 or more, or None"),
    "tp": _RANKS,
    "sequence_parallel": _FLAG,
    "tp_plan": Takes(_maybe(_names_to(_TEXT)), 'a dict of name patterns to styles ({"*.fc1": "colwise"}), or None'),
    "pp": _RANKS,
    "num_microbatches": Takes(_maybe(_count(1)), "a number of parts; use 1 or more, or None"),
    "schedule": Takes(
        _either(_TEXT, _kind(Path), _list_of(_list_of(_kind(Action)))),
        "the name of a schedule, a file of one, or a list of actions for each rank",
    ),
    "virtual_stages": Takes(_maybe(_count(1)), "a number of stages on each rank; use 1 or more, or None"),
    "layers": Takes(_maybe(_either(_TEXT, _list_of(_TEXT))), 'a name ("model.layers"), a list of names, or None'),
    "split": Takes(
        _maybe(_list_of(_count(1))), "a list with the number of layers of each stage, all 1 or more, or None"
    ),
    "place": Takes(
        _maybe(_names_to(lambda said: isinstance(said, str) and said in PLACES)),
        f"a dict of name patterns to {', '.join(map(repr, PLACES))}, or None",
    ),
    "recompute": Takes(lambda value: value is None or value == "full", "None or 'full'"),
}
