"""`@ranks(2, 4)`: turn a plain test function into one test per world size, run by all ranks at once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import pytest

from tests.harness.messages import BODY_ATTRIBUTE
from tests.harness.pool import DEFAULT_TIMEOUT, START_SECONDS, Pools

WORLD = "world"
POOLS_FIXTURE = "rank_pools"


def rank() -> int:
    """The rank of the worker that runs this body."""
    import torch.distributed as dist  # not at the top: collecting tests does not need torch

    return dist.get_rank()


def world_size() -> int:
    """The number of ranks that run this body."""
    import torch.distributed as dist

    return dist.get_world_size()


def ranks(*worlds: int, timeout: float = DEFAULT_TIMEOUT) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test on each of these world sizes, in every worker process of a pool at once.

    Values of ``pytest.mark.parametrize`` (above or below this decorator) and of picklable fixtures such as
    ``tmp_path`` reach every rank; ``monkeypatch`` is made anew on every rank. A parameter named ``world``
    receives the world size.

    Args:
        worlds: World sizes, one test each.
        timeout: Seconds for the body; after that the test fails with the stack of every rank.

    Raises:
        TypeError: The function is not at the top of its module, where workers could find it.
    """
    if not worlds:
        raise TypeError("@ranks needs at least one world size, as in @ranks(2, 4)")

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        if body.__qualname__ != body.__name__:
            raise TypeError(f"@ranks needs a function at the top of its module, not {body.__qualname__}")
        signature = inspect.signature(body)
        wants_world = WORLD in signature.parameters

        @functools.wraps(body)
        def entry(*, rank_pools: Pools, world: int, **arguments: object) -> None:
            if wants_world:
                arguments[WORLD] = world
            rank_pools.run(body, world, timeout=timeout, arguments=arguments)

        own = [inspect.Parameter(POOLS_FIXTURE, inspect.Parameter.KEYWORD_ONLY)]
        if not wants_world:
            own.append(inspect.Parameter(WORLD, inspect.Parameter.KEYWORD_ONLY))
        vars(entry)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *own])
        vars(entry)[BODY_ATTRIBUTE] = body
        by_world = pytest.mark.parametrize(WORLD, worlds, ids=[f"world{world}" for world in worlds])
        marked: Callable[..., None] = by_world(entry)
        if timeout > DEFAULT_TIMEOUT:  # the limit on whole tests, meant for usual ones, must not come first
            marked = pytest.mark.timeout(timeout + START_SECONDS)(marked)
        return marked

    return decorate
