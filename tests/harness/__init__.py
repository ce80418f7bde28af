"""Tests that run on several processes at once, without paying for the processes in every test.

    pytest ── Pools ──┬── Template (imports torch once)
                      │      ├─ fork ─ rank 0 ┐
                      │      ├─ fork ─ rank 1 ┘ pool of 2, one default process group (gloo over a FileStore)
                      │      ├─ fork ─ rank 0 ┐
                      │      └─ ...           ┘ pool of 4
                      └── sends "run function f of module m" to every rank, collects one outcome from each

A test is a plain function of a test module; every rank runs its body inside the initialised default group:

    @ranks(2, 4)
    def test_sum_of_ranks() -> None:
        total = torch.tensor(float(rank()))
        dist.all_reduce(total)
        assert total.item() == sum(range(world_size()))

A pool lives as long as its tests pass. After a failure, a timeout or a death it is killed and the next test
gets a new one, so no test sees what a broken one left behind. Linux only: the harness relies on pidfds and
/proc.
"""

from tests.harness.decorator import rank, ranks, world_size
from tests.harness.pool import HarnessError, Pools
from tests.harness.scripts import ScriptFailure, ScriptResult, Survivor, run_script
from tests.harness.verdict import Cause, RankFailure

__all__ = [
    "Cause",
    "HarnessError",
    "Pools",
    "RankFailure",
    "ScriptFailure",
    "ScriptResult",
    "Survivor",
    "rank",
    "ranks",
    "run_script",
    "world_size",
]
