"""The harness itself: what passes runs on every rank, what is broken is told, quickly and in full."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.harness import (
    Cause,
    HarnessError,
    Pools,
    RankFailure,
    ScriptFailure,
    rank,
    ranks,
    run_script,
    world_size,
)
from tests.harness.messages import Kind, Outcome
from tests.harness.stacks import Stack
from tests.harness.verdict import Death, Round

# ---------------------------------------------------------------------------------------------- what passes


@ranks(2, 3, 4)
def test_every_rank_takes_part_in_one_group() -> None:
    total = torch.tensor(float(rank()))
    dist.all_reduce(total)
    assert total.item() == sum(range(world_size()))
    assert dist.get_backend() == "gloo"
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("above", [1, 2])
@ranks(2)
@pytest.mark.parametrize("below", ["a", "b"])
def test_parameters_and_fixtures_reach_every_rank(
    above: int, below: str, tmp_path: Path, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert above in (1, 2)
    assert below in ("a", "b")
    assert world == world_size()
    monkeypatch.setenv("OF_THIS_RANK", str(rank()))
    assert os.environ["OF_THIS_RANK"] == str(rank())
    (tmp_path / f"from{rank()}").write_text(below)
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world


def test_parameters_are_crossed_with_world_sizes(request: pytest.FixtureRequest) -> None:
    name = test_parameters_and_fixtures_reach_every_rank.__name__
    collected = [item for item in request.session.items if item.name.startswith(name)]
    if len(request.session.items) > 10:  # not when single tests were selected
        assert len(collected) == 4


def body_ranks() -> tuple[int, int]:
    return rank(), world_size()


def test_run_returns_what_each_rank_returned(rank_pools: Pools) -> None:
    assert rank_pools.run(body_ranks, 4) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_processes_are_reused(rank_pools: Pools) -> None:
    rank_pools.run(body_ranks, 2)
    first = rank_pools.pids(2)
    rank_pools.run(body_ranks, 2)
    assert rank_pools.pids(2) == first
    assert len(set(first)) == 2
    assert os.getpid() not in first


def body_draw() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def test_random_numbers_start_the_same_on_all_ranks_and_in_all_tests(rank_pools: Pools) -> None:
    first, second = rank_pools.run(body_draw, 2), rank_pools.run(body_draw, 2)
    assert first == second
    assert first[0] == first[1]


def body_observe() -> dict[str, object]:
    return {
        "dtype": torch.get_default_dtype(),
        "device": str(torch.empty(0).device),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "directory": os.getcwd(),
        "left_behind": os.environ.get("LEFT_BEHIND"),
        "path": list(sys.path),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def body_disturb(tmp_path: Path) -> None:
    dist.new_group(list(range(world_size())))
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    os.chdir(tmp_path)
    os.environ["LEFT_BEHIND"] = "yes"
    sys.path.insert(0, "nowhere")


def test_what_a_test_disturbs_is_restored(rank_pools: Pools, tmp_path: Path) -> None:
    before = rank_pools.run(body_observe, 2)
    rank_pools.run(body_disturb, 2, arguments={"tmp_path": tmp_path})
    assert rank_pools.run(body_observe, 2) == before


def body_print() -> None:
    print(f"printed by {rank()}")
    os.write(2, b"written below Python\n")


def test_output_of_workers_is_shown_by_rank(rank_pools: Pools, capsys: pytest.CaptureFixture[str]) -> None:
    rank_pools.run(body_print, 2)
    shown = capsys.readouterr().out
    assert "[rank 0] printed by 0" in shown
    assert "[rank 1] printed by 1" in shown
    assert shown.count("written below Python") == 2


# ----------------------------------------------------------------------------------------------- what fails


def failure(pools: Pools, body: object, world: int, timeout: float = 30.0) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        pools.run(body, world, timeout=timeout)  # type: ignore[arg-type]
    return caught.value


def body_compare_on_rank_1() -> None:
    if rank() == 1:
        got = {"a": [1, 2, 3]}
        assert got == {"a": [1, 2, 4]}
    dist.barrier()


def test_failed_assertion_shows_values_and_where_the_others_wait(rank_pools: Pools) -> None:
    rank_pools.run(body_ranks, 3)
    before = rank_pools.pids(3)
    start = time.monotonic()
    told = failure(rank_pools, body_compare_on_rank_1, 3)
    assert time.monotonic() - start < 15  # ranks that wait in vain are given up long before the timeout
    assert told.cause is Cause.RAISED
    assert told.rank == 1
    message = str(told)
    assert "assert {'a': [1, 2, 3]} == {'a': [1, 2, 4]}" in message
    assert "in test" not in message.splitlines()[0]
    assert "test_harness.py" in message
    assert "Differing items" in message
    assert "rank 0 was still at" in message
    assert "in body_compare_on_rank_1" in message
    assert rank_pools.run(body_ranks, 3) == [(0, 3), (1, 3), (2, 3)]
    assert not set(before) & set(rank_pools.pids(3)), "a pool that saw a failure must be replaced"


def body_rank_0_fails_late() -> None:
    time.sleep(0.3 if rank() == 0 else 0.0)
    raise ValueError(f"from rank {rank()}")


def test_first_failure_in_time_is_told_in_full(rank_pools: Pools) -> None:
    told = failure(rank_pools, body_rank_0_fails_late, 2)
    assert told.rank == 1
    assert "ValueError: from rank 1" in str(told)
    assert "  rank 0 failed: ValueError: from rank 0" in str(told)


def body_exit() -> None:
    if rank() == 1:
        sys.exit("enough")


def test_sys_exit_in_a_body_is_a_failure(rank_pools: Pools) -> None:
    told = failure(rank_pools, body_exit, 2)
    assert told.cause is Cause.RAISED
    assert "SystemExit: enough" in str(told)


def body_die() -> None:
    if rank() == 1:
        print("last words")
        os._exit(7)
    dist.barrier()


def body_be_killed() -> None:
    if rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_death_is_told_with_its_exit_code_and_not_its_consequences(rank_pools: Pools) -> None:
    told = failure(rank_pools, body_die, 2)
    assert told.cause is Cause.DIED
    assert told.rank == 1
    assert str(told).startswith("rank 1 of 2 ended by itself with exit code 7")
    assert "last words" in str(told)
    assert "(a consequence)" in str(told).splitlines()[-1]


def test_death_by_a_signal_is_told_by_name(rank_pools: Pools) -> None:
    told = failure(rank_pools, body_be_killed, 2)
    assert told.cause is Cause.DIED
    assert str(told).startswith("rank 0 of 2 was killed by signal 9 (SIGKILL)")


def test_death_between_tests_is_nobodys_failure(rank_pools: Pools) -> None:
    rank_pools.run(body_ranks, 2)
    victim = rank_pools.pids(2)[0]
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.2)
    assert rank_pools.run(body_ranks, 2) == [(0, 2), (1, 2)]
    assert victim not in rank_pools.pids(2)


def waits_in_a_collective() -> None:
    dist.barrier()


def sleeps_for_long() -> None:
    time.sleep(1000)


def body_hang() -> None:
    threading.Thread(target=sleeps_for_long, daemon=True).start()
    if rank() == 0:
        waits_in_a_collective()
    elif rank() == 1:
        sleeps_for_long()


def test_timeout_tells_every_ranks_stack(rank_pools: Pools) -> None:
    start = time.monotonic()
    told = failure(rank_pools, body_hang, 3, timeout=2.0)
    assert time.monotonic() - start < 10
    assert told.cause is Cause.TIMED_OUT
    first, rank_0, rank_1, rank_2 = split_by_rank(str(told))
    assert first.startswith("timeout: not finished after 2 s on ranks [0, 1] of 3")
    assert "in waits_in_a_collective" in rank_0
    assert "in body_hang" in rank_0
    assert rank_1.count("in sleeps_for_long") == 2  # the main thread's and the other's
    assert rank_2.strip() == "rank 2 passed"
    assert "_die_with" not in str(told), "the harness's own frames only distract"
    assert "template.py" not in str(told)


def split_by_rank(message: str) -> list[str]:
    parts = [message.index("\nrank 0"), message.index("\nrank 1"), message.index("\nrank 2"), len(message)]
    return [message[: parts[0]], *(message[start:end] for start, end in pairwise(parts))]


def body_leave_a_collective_behind() -> None:
    if rank() == 1:
        dist.all_reduce(torch.ones(5), async_op=True)


def body_destroy_the_group() -> None:
    dist.destroy_process_group()


def test_unmatched_collective_is_blamed_on_the_test_that_left_it(
    rank_pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.harness.pool.TIDY_SECONDS", 1.0)
    told = failure(rank_pools, body_leave_a_collective_behind, 2)
    assert told.cause is Cause.LEFT_BROKEN
    told = failure(rank_pools, body_destroy_the_group, 2)
    assert told.cause is Cause.LEFT_BROKEN
    assert "destroyed the default process group" in str(told)
    assert rank_pools.run(body_ranks, 2) == [(0, 2), (1, 2)]


def body_start_a_process_and_fail(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (tmp_path / str(rank())).write_text(str(child.pid))
    dist.barrier()
    raise RuntimeError("after the processes were started")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_what_a_failed_test_started_is_ended_with_it(rank_pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="after the processes were started"):
        rank_pools.run(body_start_a_process_and_fail, 2, arguments={"tmp_path": tmp_path})
    children = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(children) == 2
    give_up = time.monotonic() + 5
    while any(map(is_running, children)) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not any(map(is_running, children))


def body_return_a_lock() -> object:
    return threading.Lock()


def test_values_that_cannot_travel_are_named(rank_pools: Pools) -> None:
    with pytest.raises(HarnessError, match="argument 'lock' of type lock cannot be sent"):
        rank_pools.run(body_ranks, 2, arguments={"lock": threading.Lock()})
    assert "cannot pickle" in str(failure(rank_pools, body_return_a_lock, 2))


# --------------------------------------------------------------------------------------- skips and their kin


def body_skip() -> None:
    pytest.skip("no such thing here")


def body_skip_on_rank_0() -> None:
    if rank() == 0:
        pytest.skip("only here")


def body_expect_failure() -> None:
    pytest.xfail("known")


def test_skip_of_all_ranks_skips_and_keeps_the_pool(rank_pools: Pools) -> None:
    rank_pools.run(body_ranks, 2)
    before = rank_pools.pids(2)
    with pytest.raises(pytest.skip.Exception, match="no such thing here"):
        rank_pools.run(body_skip, 2)
    with pytest.raises(pytest.xfail.Exception, match="known"):
        rank_pools.run(body_expect_failure, 2)
    assert rank_pools.run(body_ranks, 2) == [(0, 2), (1, 2)]
    assert rank_pools.pids(2) == before


def test_skip_of_one_rank_is_a_failure(rank_pools: Pools) -> None:
    told = failure(rank_pools, body_skip_on_rank_0, 2)
    assert told.cause is Cause.DISAGREED
    assert "rank 0 skipped: only here" in str(told)
    assert "rank 1 passed" in str(told)


@pytest.mark.parametrize("worlds", [(), (2,)])
def test_decorator_refuses_what_workers_could_not_run(worlds: tuple[int, ...]) -> None:
    def inside() -> None: ...

    with pytest.raises(TypeError, match="top of its module" if worlds else "at least one world size"):
        ranks(*worlds)(inside)


# ---------------------------------------------------------------------------------- choice of the culprit


def failed(rank: int, when: float, headline: str) -> Outcome:
    return Outcome(rank, Kind.FAILED, when, headline, headline)


RESET = "RuntimeError: Read error [127.0.0.1]:1664: Connection reset by peer"


@pytest.mark.parametrize(
    ("outcomes", "deaths", "culprit"),
    [
        ([failed(0, 1.0, RESET), failed(1, 2.0, "ValueError: cause")], [], 1),
        ([failed(0, 2.0, "ValueError: late"), failed(1, 1.0, "ValueError: early")], [], 1),
        ([failed(0, 1.0, RESET)], [1], 1),
        ([failed(0, 2.0, RESET), failed(1, 1.0, RESET)], [], 1),
        ([failed(0, 0.5, "ValueError: before")], [1], 0),
    ],
)
def test_the_cause_is_told_from_its_consequences(outcomes: list[Outcome], deaths: list[int], culprit: int) -> None:
    result = Round(world=2)
    result.outcomes = {outcome.rank: outcome for outcome in outcomes}
    result.deaths = {dead: Death(when=0.9, status=256, log="") for dead in deaths}
    with pytest.raises(RankFailure) as caught:
        result.conclude(60.0)
    assert caught.value.rank == culprit


def test_position_prefers_the_frame_of_the_repository() -> None:
    text = '  File "/x/site-packages/torch/a.py", line 1 in inner\n  File "/r/tests/b.py", line 2 in outer'
    assert Stack(text).position() == "/r/tests/b.py:2 in outer"
    assert Stack("").position() == "an unknown place"


# ------------------------------------------------------------------------------------------------- end to end

INNER_TESTS = """
import pytest

from tests.harness import rank, ranks, world_size


@ranks(2)
def test_passes(tmp_path):
    assert world_size() == 2


@ranks(2)
def test_compares():
    numbers = [10, 20, 30 + rank()]
    print("seen by", rank())
    assert sum(numbers) == 60


@ranks(2)
@pytest.mark.parametrize("reason", ["not today"])
def test_skips(reason):
    pytest.skip(reason)


@ranks(2)
def test_passes_afterwards():
    assert rank() < 2
"""


def test_pytest_reports_each_outcome(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import rank_pools  # noqa: F401\n")
    inner = tmp_path / "test_inner.py"
    inner.write_text(INNER_TESTS)
    ended = run_script(
        inner,
        "-rs",
        "-p",
        "no:cacheprovider",
        interpreter_args=("-m", "pytest"),
        directory=tmp_path,
        expect=1,
    )
    assert "1 failed, 2 passed, 1 skipped" in ended.output
    assert "test_compares[world2]" in ended.output
    assert "assert 61 == 60" in ended.output
    assert "where 61 = sum([10, 20, 31])" in ended.output
    assert "[rank 1] seen by 1" in ended.output
    assert "test_inner.py:19: not today" in ended.output
    assert "verdict.py" not in ended.output, "a failure should not lead the reader into the harness"
    assert ended.survivors == ()


STUCK_BODIES = """
import time
import torch.distributed as dist
from tests.harness import rank

def body_hang():
    if rank() == 0:
        dist.barrier()
    elif rank() == 1:
        time.sleep(1000)
"""
ABANDON = """
    import os, signal, threading, time
    from tests.harness import Pools

    def body_hang(): ...
    body_hang.__module__ = "stuck_bodies"  # found by name in the workers: torch need not be imported here

    pools = Pools()
    threading.Thread(target=pools.run, args=(body_hang, 3), kwargs={"timeout": 1000}, daemon=True).start()
    while len(pools.pids(3)) < 3:
        time.sleep(0.05)
    time.sleep(0.5)
    print("workers", *pools.pids(3), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_do_not_outlive_a_killed_pytest(tmp_path: Path) -> None:
    (tmp_path / "stuck_bodies.py").write_text(STUCK_BODIES)
    left_behind = {"TMPDIR": str(tmp_path)}  # nobody is left to remove the pools' directories
    ended = run_script(ABANDON, directory=tmp_path, env=left_behind, expect=-signal.SIGKILL)
    workers = [int(pid) for pid in ended.output.split("workers", 1)[1].split()]
    assert len(workers) == 3
    assert ended.survivors == ()
    assert not any(map(is_running, workers))


# ------------------------------------------------------------------------------------------------- scripts


def test_script_runs_as_a_user_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    (tmp_path / "sibling.py").write_text("word = 'found beside the script'\n")
    source = """
        import os, sys, tests, sibling
        print(sys.argv[1:], os.environ["SCRIPT_WORLD"], os.environ["EXTRA"], "LOCAL_RANK" in os.environ)
        print(sibling.word, os.environ["PYTHONPATH"], __file__)
        print("to stderr", file=sys.stderr)
    """
    ended = run_script(source, "--fast", "7", world=2, env={"EXTRA": "yes"}, directory=tmp_path)
    repository = Path(__file__).parents[1]
    assert ended.returncode == 0
    assert ended.output.splitlines() == [
        "['--fast', '7'] 2 yes False",
        f"found beside the script {repository}{os.pathsep}{tmp_path} {tmp_path / 'script.py'}",
        "to stderr",
    ]
    assert 0 < ended.seconds < 60
    assert run_script(tmp_path / "script.py", world=1, env={"EXTRA": "no"}).output.startswith("[] 1 no False")


def test_exit_code_is_demanded() -> None:
    with pytest.raises(ScriptFailure, match=r"ended with exit code 3, not 0\n(.|\n)*about to leave"):
        run_script("print('about to leave'); raise SystemExit(3)")
    assert run_script("raise SystemExit(3)", expect=3).returncode == 3
    assert run_script("raise SystemExit(4)", expect=None).returncode == 4


FAMILY = """
    import subprocess, sys, time
    if len(sys.argv) == 1:  # the child leaves the process group, and must be found all the same
        subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
        {end}
    else:
        def the_child_waits_here():
            time.sleep(1000)
        the_child_waits_here()
"""


def test_script_that_leaves_a_child_behind_is_told_on() -> None:
    ended = run_script(FAMILY.format(end="time.sleep(0.5)"), linger=0.2)
    assert len(ended.survivors) == 1
    assert ended.survivors[0].command.endswith("script.py child")
    assert not is_running(ended.survivors[0].pid)


def test_script_that_hangs_is_killed_with_all_its_processes_and_tells_their_stacks() -> None:
    with pytest.raises(ScriptFailure, match="did not end within 3 s") as caught:
        run_script(FAMILY.format(end="time.sleep(1000)"), timeout=3.0)
    result = caught.value.result
    assert result.timed_out
    assert "in the_child_waits_here" in result.output
    assert result.output.count("most recent call first") == 2
    assert result.seconds < 10
    survived = [child for child in multiprocessing.active_children() if child.is_alive()]
    assert survived == []
