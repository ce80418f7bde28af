"""Which layers make which stage: contiguous runs whose dearest one is as cheap as can be.

What surrounds the chain counts: the first stage carries the embedding, the last one the head. Until a step has been
measured, cost is estimated as multiplications per token: the elements of every matrix that a token passes (an embedding
is a lookup and costs nothing; a head over 50,000 words costs as much as several layers). With costs c_0, ..., c_{n-1}
of the layers, and those of the ends added to the first and the last one, the split minimizes the largest sum::

    best(k, j) = min over i of  max( best(k-1, i), c_i + ... + c_{j-1} )        k stages for the first j layers
"""

import itertools
from collections.abc import Mapping, Sequence

from torch import nn

from lightning_dist.core.errors import ConfigurationError
from lightning_dist.pipeline.chain import Chain


def bounds_of(split: Sequence[int], chain: Chain, num_stages: int) -> tuple[int, ...]:
    """The first layer of each stage, and the number of layers, from the number of layers in each stage.

    Raises:
        ConfigurationError: a wrong number of stages, an empty stage, or layers that are lost or invented.
    """
    given = f"split={list(split)}"
    if len(split) != num_stages:
        raise ConfigurationError(f"{given} names {len(split)} stages, but there are {num_stages}")
    if any(type(size) is not int or size < 1 for size in split):
        raise ConfigurationError(f"{given}: every stage needs one layer or more")
    if sum(split) != len(chain):
        difference = len(chain) - sum(split)
        raise ConfigurationError(
            f"{given} has {sum(split)} layers, but {chain.name} has {len(chain)}: "
            + (f"{difference} would be lost" if difference > 0 else f"{-difference} do not exist")
        )
    return (0, *itertools.accumulate(split))


def balance(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """The number of layers of each stage, so that the dearest stage is as cheap as possible.

    Args:
        costs: of each layer, in any unit.
        first: what the first stage has to do besides its layers.
        last: the same for the last stage.

    Raises:
        ConfigurationError: fewer layers than stages.
    """
    n = len(costs)
    if n < num_stages:
        raise ConfigurationError(
            f"{n} layers cannot fill {num_stages} pipeline stages, each of which needs one: use at most {n} stages "
            "(pp times virtual stages)"
        )
    sums = [0.0, *itertools.accumulate(costs)]
    sums = [total + first for total in sums]
    sums[0] = 0.0
    sums[n] += last
    # best[j]: the cheapest (dearest stage, sizes so far) of the first j layers; ties go to the evenest sizes
    best = {j: (sums[j], [j]) for j in range(1, n + 1)}
    for stage in range(1, num_stages):
        best = {
            j: min(
                ((max(best[i][0], sums[j] - sums[i]), [*best[i][1], j - i]) for i in range(stage, j)),
                key=lambda entry: (entry[0], sum(size * size for size in entry[1])),
            )
            for j in range(stage + 1, n + 1)
        }
    return best[n][1]


def estimated_costs(module: nn.Module, chain: Chain, *, after: Sequence[nn.Module]) -> tuple[list[float], float, float]:
    """Multiplications per token: of each layer, of what comes before the chain, and of what comes after it.

    Args:
        after: the modules outside the chain that are computed after it.
    """
    inside = {part for layer in chain.layers for part in layer.modules()}
    late = set(after)
    outside = [part for part in module.modules() if part not in inside]
    before_cost = sum(_own_cost(part) for part in outside if part not in late)
    after_cost = sum(_own_cost(part) for part in late)
    return [sum(_own_cost(part) for part in layer.modules()) for layer in chain.layers], before_cost, after_cost


def _own_cost(part: nn.Module) -> float:
    """Elements of the matrices that a module holds itself; a lookup multiplies nothing."""
    if isinstance(part, nn.Embedding):
        return 0.0
    return float(sum(p.numel() for p in part.parameters(recurse=False) if p.ndim > 1))


def better_split(times: Mapping[int, float], split: Sequence[int]) -> tuple[list[int], float]:
    """A split for the times that the stages were measured to take, and how much faster its slowest stage would be.

    A layer is taken to cost what it costs on average in a stage between the ends; what the ends take beyond that is the
    embedding and the head.
    """
    stages = range(len(split))
    each = [times.get(stage, 0.0) / split[stage] for stage in stages]
    layer = min(each)
    inner = [each[stage] if 0 < stage < len(split) - 1 else layer for stage in stages]
    costs = [inner[stage] for stage in stages for _ in range(split[stage])]
    first = times.get(0, 0.0) - layer * split[0]
    last = times.get(len(split) - 1, 0.0) - layer * split[-1] if len(split) > 1 else 0.0
    best = balance(costs, len(split), first=first, last=last)
    sums = [0.0, *itertools.accumulate(costs)]
    bounds = [0, *itertools.accumulate(best)]
    slowest = max(
        sums[bounds[stage + 1]]
        - sums[bounds[stage]]
        + (first if stage == 0 else 0.0)
        + (last if stage == len(best) - 1 else 0.0)
        for stage in stages
    )
    now = max(times.values(), default=0.0)
    return best, 1 - slowest / now if now > 0 else 0.0
