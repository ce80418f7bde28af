"""A wrong plan is slow, not wrong: whatever styles are given to whatever layers, losses and gradients are those of one
process, or the plan is refused in words before anything is computed.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch

from lightning_dist.comm import Mesh
from lightning_dist.core.errors import ConfigurationError, UnsupportedModelError
from lightning_dist.core.layout import Layout
from lightning_dist.core.shard import cut_of
from lightning_dist.tensor.cut import cut_module
from lightning_dist.tensor.styles import STYLES
from tests.harness import ranks, world_size
from tests.test_tensor_parity import EXACT, assert_same_gradients
from tests.tp.models import CASES

CASE = CASES["hand_written"]
LINEARS = ("attention.qkv", "attention.proj", "up", "down")
TIED = ("words", "head")
PLACES = [f"blocks.{block}.{name}" for block in range(2) for name in LINEARS] + [*TIED, "places"]
LIKELY = ("colwise", "rowwise", "colwise", "rowwise", "packed_colwise", "packed_rowwise")
ODD = ("blocks.*.norm1", "norm", "blocks.0.up.weight", "blocks.1.down.weight", "blocks.0.up.bias", "blocks.1.attention")
BATCHES, PLANS = 6, 40

REFUSED = (
    "are the same parameter but would be cut differently",
    "is a LayerNorm; tensor-parallel styles cut linears and embeddings",
    "is a Attention; tensor-parallel styles cut linears and embeddings",
    "features are not 3 equal blocks",
    "features are not 2 equal blocks",
    "has one dim: a rowwise style needs a matrix",
    "is not a module of experts",
    'cannot be "moe_tp_experts"',
    "cannot be cut for tensor parallelism",
)


def random_plan(draw: random.Random) -> dict[str, str]:
    """Any style, or none, for every linear and embedding; at times for what is neither."""
    plan = {}
    for place in PLACES:
        if draw.random() < 0.7:
            likely = ("qkv_colwise", *LIKELY) if place.endswith("qkv") else LIKELY[: 4 if place in TIED else None]
            plan[place] = draw.choice(likely) if draw.random() < 0.9 else draw.choice(sorted(STYLES))
    if {*TIED} <= {*plan} and draw.random() < 0.9:  # one weight, which cannot be cut in two ways
        plan["head"] = plan["words"]
    if draw.random() < 0.2:
        plan[draw.choice(ODD)] = draw.choice(("moe_tp_experts", *sorted(STYLES)))
    return plan


def outcome(plan: dict[str, str], *, sequence_parallel: bool) -> str:
    """The word "equal", after comparing with one process; or the words with which the plan is refused."""
    reference, module, batch = CASE.build(), CASE.build(), CASE.batch()
    mesh = Mesh.from_world(Layout(tp=world_size()), timeout=60.0)
    try:
        report = cut_module(module, mesh.tp, plan=plan, sequence_parallel=sequence_parallel)
    except (ConfigurationError, UnsupportedModelError) as error:
        assert not any(cut_of(parameter) for parameter in module.parameters())
        return next(words for words in REFUSED if words in str(error))
    want, got = CASE.loss(reference, batch), CASE.loss(module, batch)
    want.backward()  # type: ignore[no-untyped-call]
    got.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(got.detach(), want.detach(), rtol=EXACT, atol=0)
    assert assert_same_gradients(reference, module, mesh.tp.rank) == len(list(reference.parameters()))
    assert bool(report.cut) == any(STYLES[name].side.value != "none" for name in plan.values())
    return "equal"


@ranks(2)
def test_an_embedding_cut_like_fused_features() -> None:
    """A rank then holds several runs of words, which no lookup of its own serves."""
    for style in ("packed_colwise", "packed_rowwise"):
        assert outcome({"places": style}, sequence_parallel=False) == "equal"


@ranks(2)
def test_only_stacks_of_matrices_are_experts() -> None:
    """A block adds its input to what its linears make: added up over the ranks, that would count as often."""
    pair = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    refused = 'cannot be "moe_tp_experts"'
    assert outcome({**pair, "blocks.*": "moe_tp_experts"}, sequence_parallel=False) == refused
    assert outcome({**pair, "blocks.*.up": "moe_tp_experts"}, sequence_parallel=False) == "equal"  # all of it is whole
    assert (
        outcome({"blocks.0.up": "moe_tp_experts", "blocks.0.up.weight": "colwise"}, sequence_parallel=False) == refused
    )


@ranks(2)
@pytest.mark.parametrize("seed", range(BATCHES))
def test_random_plans_give_what_one_process_gives_or_are_refused(seed: int) -> None:
    draw, seen, pairs = random.Random(seed), Counter[str](), set()
    for number in range(PLANS):
        plan = random_plan(draw)
        sequence_parallel = number % 2 == 1
        try:
            told = outcome(plan, sequence_parallel=sequence_parallel)
        except Exception as error:
            raise AssertionError(f"{plan}, sequence_parallel={sequence_parallel}") from error
        seen[told] += 1
        if told == "equal":
            pairs |= {(plan.get(a), plan.get(b)) for a, b in itertools.pairwise(PLACES)}
    assert seen.total() == PLANS
    assert seen["equal"] >= PLANS // 2, seen
    assert pairs >= {("rowwise", "rowwise"), ("colwise", "colwise"), ("rowwise", "colwise"), (None, "rowwise")}, pairs


def test_the_sweep_is_as_wide_as_it_says() -> None:
    assert BATCHES * PLANS == 240
