"""How a world is divided, and what its replicas are."""

from __future__ import annotations

import pytest

from lightning_dist.core.errors import ConfigurationError
from lightning_dist.core.layout import Layout
from lightning_dist.strategies.replica import number_of_replicas


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [
        (Layout(dp=3), [[0], [1], [2]]),
        (Layout(tp=2), [[0, 1]]),
        (Layout(dp=2, tp=2), [[0, 1], [2, 3]]),
        (Layout(dp=2, pp=2), [[0, 2], [1, 3]]),
        (Layout(dp=2, tp=2, pp=2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_ranks_of_a_replica_differ_in_all_axes_but_the_data_parallel_one(
    layout: Layout, replicas: list[list[int]]
) -> None:
    assert layout.replicas() == replicas


def test_sizes_that_do_not_fill_the_world_are_told_what_does() -> None:
    assert [number_of_replicas("pp", size, 12) for size in (1, 3, 12)] == [12, 4, 1]
    with pytest.raises(ConfigurationError, match=r"pp=5 does not divide the 12 ranks .*; use pp=1, 2, 3, 4, 6, 12$"):
        number_of_replicas("pp", 5, 12)
