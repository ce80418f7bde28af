"""What all tests share: the worker pools, and the skipping of tests that need a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.harness import Pools
from tests.harness.environment import QUIET_CPU_RUN

for (
    _name,
    _value,
) in QUIET_CPU_RUN.items():  # before any test module imports torch, which reads some of them once
    os.environ.setdefault(_name, _value)


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Pools]:
    """The worker processes behind `@ranks`, kept for the whole run."""
    zoo = sys.modules.get("tests.zoo")
    pools = Pools(preload=zoo.HEAVY_IMPORTS if zoo is not None else ())
    yield pools
    pools.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only now: collecting other tests does not need it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
