"""Pipeline schedules: each is complete, cannot hang, and costs what its closed forms say; what is wrong is refused.

Cost models of the sweep. Schedules with whole backwards keep their closed forms under any times; swept are B = 2F,
B = F and B = 1.5 F. Those with split backwards have closed forms for F = I = W; swept are that with 1 and with 3 units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lightning_dist.core.errors import ConfigurationError
from lightning_dist.pipeline.schedule import (
    SCHEDULES,
    Action,
    InvalidScheduleError,
    Kind,
    Shape,
    Times,
    build_schedule,
    cost_of_stages,
    format_schedule,
    load_schedule,
    lower,
    parse_action,
    parse_schedule,
    simulate,
    validate,
)
from lightning_dist.pipeline.schedule.actions import COMPUTE, HOOKS, RECEIVES
from lightning_dist.pipeline.schedule.closed_forms import group_sizes
from tests.rendezvous import run_on_threads

WHOLE = (Times(1, 1, 1), Times(1, 0.5, 0.5), Times(2, 2, 1))
SPLIT = (Times(1, 1, 1), Times(3, 3, 3))
VIRTUAL = {"gpipe": (1,), "1f1b": (1,), "interleaved": (1, 2, 3), "zb_h1": (1,), "zbv": (2,)}
Case = tuple[str, Shape]


def cases(sizes: Mapping[int, tuple[int, ...]]) -> Iterator[Case]:
    for name, virtual in VIRTUAL.items():
        for v in virtual:
            for p, micro_batches in sizes.items():
                for m in micro_batches:
                    yield name, Shape(p, m, v)


def build(case: Case) -> list[list[Action]]:
    name, shape = case
    return build_schedule(name, shape.num_ranks, shape.num_micro_batches, shape.virtual_stages)


def owners_of(case: Case) -> dict[int, int]:
    name, shape = case
    ranks = range(shape.num_ranks)
    placement = SCHEDULES[name].placement
    return {s: r for r in ranks for s in placement.stages(r, shape.num_ranks, shape.virtual_stages)}


def most_receives(case: Case) -> int:
    """Posted and not yet used: one on its way and one ahead of it, in each direction at most.

    Where a group of interleaved is larger than the ring of ranks, its messages come before their turn.
    """
    name, shape = case
    if shape.virtual_stages == 1:
        return 2
    if name == "zbv":
        return 3
    return 4 + 2 * max(max(group_sizes(shape.num_ranks, shape.num_micro_batches)) - shape.num_ranks, 0)


def check(case: Case) -> None:
    """Everything that is claimed of a schedule."""
    name, shape = case
    p, m, v = shape.num_ranks, shape.num_micro_batches, shape.virtual_stages
    row = SCHEDULES[name]
    schedule, owners = build(case), owners_of(case)
    assert len(owners) == p * v
    bound = [row.live(shape, rank) for rank in range(p)]
    proof = validate(schedule, num_micro_batches=m, owners=owners, max_live=bound)
    assert list(proof.peak_live) == bound, "the bound is not reached: it says more than is needed"
    lowered = lower(schedule)
    assert [[a for a in actions if a.kind in COMPUTE] for actions in lowered] == schedule
    lowered_proof = validate(lowered, num_micro_batches=m, owners=owners, max_live=bound)
    assert max(lowered_proof.receive_buffers) <= most_receives(case)
    for times in SPLIT if name in ("zb_h1", "zbv") else WHOLE:
        cost = cost_of_stages(times, virtual_stages=v)
        timeline = simulate(schedule, cost)
        assert timeline.busy == pytest.approx([m * times.whole] * p, rel=1e-12)
        assert timeline.idle == pytest.approx(row.idle(shape, times), rel=1e-9, abs=1e-9), (case, times)
        assert timeline.idle_overlapped == pytest.approx(row.idle_overlapped(shape, times), rel=1e-9, abs=1e-9)
        assert timeline.bubble_ratio == pytest.approx(row.bubble_ratio(shape, times), rel=1e-9, abs=1e-9)
        assert timeline.bubble_share == pytest.approx(row.bubble_share(shape, times), rel=1e-9, abs=1e-9)
        assert timeline.peak_live() == bound
    # With the times that lowering assumes no sender ever waits: communication costs nothing.
    cost = cost_of_stages(Times(), virtual_stages=v)
    assert simulate(lowered, cost).spans == simulate(schedule, cost).spans


def sampled(p: int) -> tuple[int, ...]:
    """Few micro-batches, and both sides of every number at which a closed form or a phase of a schedule changes."""
    return tuple(sorted({1, 2, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 3 * p + 1} - {0}))


def test_schedules_keep_their_promises() -> None:
    swept = 0
    for case in cases({p: sampled(p) for p in (1, 2, 3, 4, 8)}):
        check(case)
        swept += 1
    assert swept == 7 * (3 + 5 + 7 + 9 + 9)


@pytest.mark.slow
def test_schedules_keep_their_promises_everywhere() -> None:
    swept = 0
    for case in cases({p: tuple(range(1, 33)) for p in range(2, 9)}):
        check(case)
        swept += 1
    assert swept == 7 * 7 * 32


def test_the_sweep_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ("1f1b", Shape(4, 8))
    check(case)
    late = build_schedule("gpipe", 4, 8)
    monkeypatch.setitem(globals(), "build", lambda case: late)
    with pytest.raises(InvalidScheduleError, match="holds the activations of 5 forwards, 4 are allowed"):
        check(case)


# --- published numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "ratio"),
    [
        ("gpipe", 8, 8, 1, 0.875),
        ("1f1b", 8, 8, 1, 0.875),
        ("1f1b", 8, 32, 1, 0.21875),
        ("1f1b", 8, 1, 1, 7.0),
        ("interleaved", 8, 32, 4, 7 / 128),
        ("interleaved", 8, 16, 2, 0.21875),
        ("zb_h1", 8, 32, 1, 0.21875 / 3),  # a third of 1f1b's
    ],
)
def test_published_bubble_ratios(name: str, p: int, m: int, v: int, ratio: float) -> None:
    schedule = build_schedule(name, p, m, v)
    assert simulate(schedule, cost_of_stages(Times(), virtual_stages=v)).bubble_ratio == pytest.approx(ratio, rel=1e-12)
    assert SCHEDULES[name].bubble_ratio(Shape(p, m, v)) == pytest.approx(ratio, rel=1e-12)


def test_zbv_has_no_bubble_where_steps_overlap() -> None:
    timeline = simulate(build_schedule("zbv", 4, 8), cost_of_stages(Times(), virtual_stages=2))
    assert timeline.idle_overlapped == 0
    assert timeline.idle == 1.5  # the last rank starts three stages late, of half a unit each


def test_interleaved_holds_what_the_paper_says() -> None:
    for p, v in ((2, 2), (4, 2), (8, 3)):
        proof = validate(build_schedule("interleaved", p, 4 * p, v))
        assert proof.peak_live[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))  # Korthikanti 2022, sec. 4.2.3


def test_gpipe_and_1f1b_in_full() -> None:
    assert format_schedule(build_schedule("gpipe", 2, 2)) == "F0.0 F0.1 B0.0 B0.1\nF1.0 F1.1 B1.0 B1.1\n"
    assert format_schedule(build_schedule("1f1b", 2, 3)) == (
        "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2\n"
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2\n"
    )  # fmt: skip


def test_lowering_in_full() -> None:
    assert format_schedule(lower(build_schedule("1f1b", 2, 2))) == (
        "UNSHARD0 F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 B0.0 RECV_B0.1 B0.1 RESHARD0 REDUCE0\n"
        "RECV_F1.0 RECV_F1.1 UNSHARD1 F1.0 B1.0 SEND_B1.0 F1.1 B1.1 SEND_B1.1 RESHARD1 REDUCE1\n"
    )


def test_a_v_sends_nothing_where_it_turns() -> None:
    lowered = lower(build_schedule("zbv", 2, 1))
    assert [str(a) for a in lowered[1] if "_" in str(a)] == ["RECV_F1.0", "SEND_F2.0", "RECV_B2.0", "SEND_B1.0"]


# --- a run by threads that knows nothing of the validator ---------------------------------------------------------


@pytest.mark.parametrize("shape", [Shape(2, 3), Shape(3, 1), Shape(4, 7)], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_threads_with_rendezvous_sends_compute_the_right_gradients(name: str, shape: Shape) -> None:
    v = {"interleaved": 2, "zbv": 2}.get(name, 1)
    schedule = lower(build_schedule(name, shape.num_ranks, shape.num_micro_batches, v))
    gradients = run_on_threads(schedule)
    # Stage s multiplies by s + 2; micro-batch i enters as i + 1; the loss is the last output.
    weights = [stage + 2 for stage in range(shape.num_ranks * v)]
    whole = 1
    for weight in weights:
        whole *= weight
    inputs = sum(range(1, shape.num_micro_batches + 1))
    assert gradients == {stage: whole // weight * inputs for stage, weight in enumerate(weights)}


def test_threads_see_a_deadlock() -> None:
    with pytest.raises(TimeoutError):
        run_on_threads(parse_schedule(CIRCLE), patience=0.2)


# --- what is wrong is refused, in words ---------------------------------------------------------------------------

# Each rank sends before it posts the receive that the other's send waits for.
CIRCLE = """
F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 B0.0 RECV_B0.1 B0.1
RECV_F1.0 F1.0 B1.0 SEND_B1.0 RECV_F1.1 F1.1 B1.1 SEND_B1.1
"""

FAULTS = {
    "a forward is dropped": (
        "F0.0 B0.0 B0.1 / F1.0 F1.1 B1.0 B1.1",
        "rank 0 lacks F0.1: stage 0 never sees micro-batch 1",
    ),
    "a backward is dropped": (
        "F0.0 F0.1 B0.0 / F1.0 F1.1 B1.0 B1.1",
        r"rank 0 lacks B0.1 \(or I0.1 and W0.1\): micro-batch 1 has no backward on stage 0",
    ),
    "a weight gradient is dropped": (
        "F0.0 I0.0 / F1.0 I1.0 W1.0",
        "rank 0 lacks W0.0: it has I0.0 at position 1, half of a backward",
    ),
    "an input gradient is dropped": ("F0.0 W0.0 / F1.0 B1.0", "rank 0 lacks I0.0: it has W0.0 at position 1"),
    "a backward is whole and split": (
        "F0.0 B0.0 W0.0 / F1.0 B1.0",
        "rank 0, position 2, W0.0: B0.0 at position 1 includes it",
    ),
    "a micro-batch is doubled": (
        "F0.0 F0.0 B0.0 / F1.0 B1.0",
        "rank 0, position 1, F0.0: stands at rank 0, position 0 already",
    ),
    "a stage is on the wrong rank": (
        "F0.0 F0.1 B0.0 B0.1 / F1.0 F1.1 F0.2 B1.0 B1.1",
        "rank 1, position 2, F0.2: stage 0 is on rank 0; rank 1 has stage 1",
    ),
    "a stage is missing": ("F0.0 B0.0 / F2.0 B2.0", "no rank computes stage 1 of 3"),
    "a backward comes before its forward": (
        "B0.0 F0.0 / F1.0 B1.0",
        "rank 0, position 0, B0.0: needs F0.0, which comes later, at position 1",
    ),
    "a weight gradient comes first": (
        "F0.0 W0.0 I0.0 / F1.0 B1.0",
        "rank 0, position 1, W0.0: needs I0.0, which comes later, at position 2",
    ),
    "two ranks wait for each other": (
        "F0.0 B0.0 F0.1 B0.1 / F1.0 F1.1 B1.0 B1.1",
        r"the schedule hangs: rank 0, position 1, B0.0 waits for B1.0 \(rank 1, position 2\); "
        r"rank 1, position 1, F1.1 waits for F0.1 \(rank 0, position 2\)",
    ),
    "two sends wait for each other": (
        CIRCLE.strip().replace("\n", " / "),
        r"the schedule hangs: rank 0, position 3, SEND_F0.1 waits for RECV_F1.1 \(rank 1, position 4\); "
        r"rank 1, position 3, SEND_B1.0 waits for RECV_B0.0 \(rank 0, position 4\)",
    ),
    "a send is missing": (
        "F0.0 RECV_B0.0 B0.0 / RECV_F1.0 F1.0 B1.0 SEND_B1.0",
        "rank 0, position 0, F0.0: its result is never sent: SEND_F0.0 is missing on rank 0",
    ),
    "a receive is missing": (
        "F0.0 SEND_F0.0 RECV_B0.0 B0.0 / F1.0 B1.0 SEND_B1.0",
        "rank 1, position 0, F1.0: needs RECV_F1.0 ahead of it, which is missing on rank 1",
    ),
    "a send comes too early": (
        "SEND_F0.0 F0.0 RECV_B0.0 B0.0 / RECV_F1.0 F1.0 B1.0 SEND_B1.0",
        "rank 0, position 0, SEND_F0.0: sends what is made later, at position 1",
    ),
    "a receive comes too late": (
        "F0.0 SEND_F0.0 B0.0 RECV_B0.0 / RECV_F1.0 F1.0 B1.0 SEND_B1.0",
        "rank 0, position 2, B0.0: needs RECV_B0.0, which comes later, at position 3",
    ),
    "a message has one end": (
        "F0.0 SEND_F0.0 RECV_B0.0 B0.0 SEND_B0.0 / RECV_F1.0 F1.0 B1.0 SEND_B1.0",
        "rank 0, position 4, SEND_B0.0: no other rank takes part in this message",
    ),
    "messages are received in another order": (
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 RECV_B0.1 B0.0 B0.1 / "
        "RECV_F1.1 RECV_F1.0 F1.0 B1.0 SEND_B1.0 F1.1 B1.1 SEND_B1.1",
        r"rank 1, position 0, RECV_F1.1: rank 0 sends SEND_F0.0 first \(position 1\), so messages from rank 0",
    ),
    "a stage is used before it is there": (
        "F0.0 UNSHARD0 B0.0",
        "rank 0, position 0, F0.0: uses stage 0 before UNSHARD0 at position 1",
    ),
    "a stage is used after it is gone": (
        "F0.0 RESHARD0 B0.0",
        "rank 0, position 2, B0.0: uses stage 0 after RESHARD0 at position 1",
    ),
    "gradients are reduced too early": (
        "F0.0 I0.0 REDUCE0 W0.0",
        "rank 0, position 3, W0.0: uses stage 0 after REDUCE0 at position 2",
    ),
    "nothing is computed": ("UNSHARD0", "the schedule computes nothing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_named(fault: str) -> None:
    text, message = FAULTS[fault]
    with pytest.raises(InvalidScheduleError, match=message):
        validate(parse_schedule(text.replace(" / ", "\n")))


def test_a_schedule_for_other_numbers_is_refused() -> None:
    schedule = build_schedule("1f1b", 2, 3)
    with pytest.raises(InvalidScheduleError, match=r"rank 0 lacks F0.3"):
        validate(schedule, num_micro_batches=4)
    with pytest.raises(InvalidScheduleError, match=r"rank 0, position 3, F0.2: there are only 2 micro-batches"):
        validate(schedule, num_micro_batches=2)
    with pytest.raises(InvalidScheduleError, match=r"position 0, F0.0: stage 0 is on rank 1; rank 0 has stage 1"):
        validate(schedule, owners={0: 1, 1: 0})


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_single_loss_and_every_repetition_is_caught(name: str) -> None:
    """Whatever is lost from a lowered schedule, or done twice, makes it invalid."""
    lowered = lower(build_schedule(name, 3, 4))
    tried = 0
    for rank, actions in enumerate(lowered):
        for position, action in enumerate(actions):
            for replacement in ([], [action, action]):
                if action.kind in HOOKS and not replacement:
                    continue  # hooks may be left out: not all users have handlers for them
                broken = [list(row) for row in lowered]
                broken[rank][position : position + 1] = replacement
                with pytest.raises(InvalidScheduleError):
                    validate(broken)
                tried += 1
    assert tried == 2 * sum(map(len, lowered)) - sum(a.kind in HOOKS for row in lowered for a in row)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_every_swap_of_neighbours_is_caught_or_harmless(name: str) -> None:
    """The validator against threads: what it lets pass gives the same gradients."""
    lowered = lower(build_schedule(name, 2, 2))
    gradients = run_on_threads(lowered)
    passed = caught = 0
    for rank, actions in enumerate(lowered):
        for position in range(len(actions) - 1):
            swapped = [list(row) for row in lowered]
            row = swapped[rank]
            row[position], row[position + 1] = row[position + 1], row[position]
            try:
                validate(swapped)
            except InvalidScheduleError:
                caught += 1
                continue
            passed += 1
            assert run_on_threads(swapped) == gradients
    assert passed + caught == sum(map(len, lowered)) - 2
    assert passed > 5 and caught > 5


def test_lowering_takes_compute_actions_alone() -> None:
    with pytest.raises(InvalidScheduleError, match=r"rank 0, position 1, SEND_F0.0: lowering adds sends"):
        lower(parse_schedule("F0.0 SEND_F0.0 B0.0\nF1.0 B1.0"))


# --- names and numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), "schedule='2f2b' is not known; use 'gpipe', '1f1b', 'interleaved', 'zb_h1', 'zbv'"),
        (("1f1b", 2, 2, 2), "virtual_stages=2 does not go with schedule='1f1b', which has 1 on each rank"),
        (("zbv", 2, 2, 3), "virtual_stages=3 does not go with schedule='zbv', which has 2 on each rank"),
        (("1f1b", 0, 2), "num_ranks=0 is not a size"),
        (("gpipe", 2, 0), "num_micro_batches=0 is not a size"),
        (("interleaved", 2, 2, 0), "virtual_stages=0 is not a size"),
    ],
)
def test_arguments_that_cannot_work(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_schedule(*arguments)


# --- files ----------------------------------------------------------------------------------------------------------


def test_every_schedule_survives_a_file(tmp_path: Path) -> None:
    kinds = set()
    for name in SCHEDULES:
        lowered = lower(build_schedule(name, 3, 4))
        file = tmp_path / f"{name}.txt"
        file.write_text(format_schedule(lowered), encoding="utf-8")
        assert load_schedule(file) == lowered
        kinds |= {action.kind for row in lowered for action in row}
    assert kinds == set(Kind)


def test_comments_and_empty_lines() -> None:
    text = "# two ranks\n\nF0.0  B0.0   # rank 0\n\tF1.0\tB1.0\n"
    assert format_schedule(parse_schedule(text)) == "F0.0 B0.0\nF1.0 B1.0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 B0.0\nF1.0  X1.0", "mine.txt, line 2, column 7: 'X1.0' is not an action; write F, B, I or W"),
        ("F0.0 f0.1", "line 1, column 6: 'f0.1' is not an action"),
        ("F0.0 F0.-1", "line 1, column 6: 'F0.-1' is not an action"),
        ("F0", "line 1, column 1: 'F0' lacks its micro-batch"),
        ("# one\nREDUCE0.1", "line 2, column 1: 'REDUCE0.1' has a micro-batch, but a hook concerns the whole stage"),
        ("\n# nothing\n", "mine.txt holds no actions; write one line for each rank"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidScheduleError, match=message):
        load_schedule(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidScheduleError, match=r"none.txt cannot be read"):
        load_schedule(tmp_path / "none.txt")


def test_actions_are_values() -> None:
    assert parse_action("F0.3") == Action(Kind.FORWARD, 0, 3)
    assert {parse_action("RECV_B12.34"), Action(Kind.RECV_BACKWARD, 12, 34)} == {parse_action("RECV_B12.34")}
    assert str(Action(Kind.UNSHARD, 2)) == "UNSHARD2"


# --- simulation -----------------------------------------------------------------------------------------------------


def test_times_of_stages_and_transfers() -> None:
    schedule = build_schedule("1f1b", 2, 1)
    times = [Times(1, 2, 1), Times(4, 1, 3)]
    timeline = simulate(schedule, cost_of_stages(times), transfer=0.5)
    assert [[(span.start, span.end) for span in row] for row in timeline.spans] == [
        [(0, 1), (10, 13)],  # 1 + 0.5 + 4 + 4 + 0.5
        [(1.5, 5.5), (5.5, 9.5)],
    ]
    assert timeline.makespan == 13 and timeline.busy == [4, 8] and timeline.critical_rank == 1
    assert timeline.idle == 5 and timeline.bubble_share == pytest.approx(1 - 12 / 26)
    assert timeline.stage_busy == {0: 4, 1: 8}
    assert simulate(lower(schedule), cost_of_stages(times), transfer=0.5).spans == timeline.spans


def test_live_activations_have_sizes() -> None:
    timeline = simulate(build_schedule("interleaved", 2, 4, 2), cost_of_stages(Times(), virtual_stages=2))
    assert timeline.peak_live() == [5, 3]
    # Rank 0 has stages 0 and 2; when it holds most it has four of the first and one of the second.
    assert timeline.peak_live(sizes=[10, 0, 1, 0]) == [41, 0]


def test_a_send_that_waits_takes_its_time() -> None:
    """The receive comes late in rank 1's order: rank 0 is held up, which the prefetch of `lower` avoids."""
    late = parse_schedule(
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 F0.2 SEND_F0.2 RECV_B0.0 RECV_B0.1 RECV_B0.2 B0.0 B0.1 B0.2\n"
        "RECV_F1.0 F1.0 RECV_F1.1 RECV_F1.2 F1.1 F1.2 B1.0 SEND_B1.0 B1.1 SEND_B1.1 B1.2 SEND_B1.2"
    )
    validate(late)
    spans = simulate(late, cost_of_stages([Times(1, 1, 1), Times(3, 1, 1)])).spans[0]
    assert [(str(span.action), span.start, span.end) for span in spans[:4]] == [
        ("F0.0", 0, 1),
        ("F0.1", 1, 2),
        ("SEND_F0.1", 2, 4),  # until rank 1 has done F1.0
        ("F0.2", 4, 5),
    ]


def test_uneven_times_cost_little_with_prefetched_receives() -> None:
    """Times that lowering did not assume: interleaved loses two percent at most to waiting sends, the others none."""
    tried = 0
    for case in cases(dict.fromkeys((2, 4, 8), (1, 3, 8, 16))):
        name, shape = case
        schedule = build(case)
        lowered = lower(schedule)
        stages = range(shape.num_ranks * shape.virtual_stages)
        # Multiples of an irrational number, taken modulo 1, are spread evenly and the same in every run.
        uneven = [Times(*(0.7 + (0.618034 * (3 * stage + k) % 1) * 0.8 for k in range(3))) for stage in stages]
        for times in ([Times(1, 2, 1)] * len(stages), [Times(1, 0.7, 0.6)] * len(stages), uneven):
            ideal = simulate(schedule, cost_of_stages(times), transfer=0.1).makespan
            real = simulate(lowered, cost_of_stages(times), transfer=0.1).makespan
            assert ideal <= real * (1 + 1e-12)
            assert real <= ideal * (1.02 if name == "interleaved" else 1 + 1e-12), (case, times)
            tried += 1
    assert tried == 7 * 3 * 4 * 3


def test_without_prefetch_rendezvous_sends_hang() -> None:
    """1f1b with each receive directly ahead of its use: two neighbours send to each other first, and wait for ever."""
    lowered = lower(build_schedule("1f1b", 4, 8))
    late = []
    for row in lowered:
        receives = {(a.kind is Kind.RECV_FORWARD, a.stage, a.micro_batch): a for a in row if a.kind in RECEIVES}
        new: list[Action] = []
        for action in row:
            if action.kind in COMPUTE:
                receive = receives.get((action.kind is Kind.FORWARD, action.stage, action.micro_batch))
                new += [receive] if receive is not None else []
            if action.kind not in RECEIVES:
                new.append(action)
        late.append(new)
    with pytest.raises(InvalidScheduleError, match=r"SEND_F2.1 waits for RECV_F3.1.*SEND_B3.0 waits for RECV_B2.0"):
        validate(late)
