"""How actions are named in drawings."""

from collections.abc import Sequence

from lightning_dist.pipeline.schedule.actions import COMPUTE, Action, Kind
from lightning_dist.pipeline.schedule.spans import Span, Timeline

MEANINGS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.SEND_FORWARD: "sending an output",
    Kind.SEND_BACKWARD: "sending a gradient",
    Kind.RECV_FORWARD: "receiving an input",
    Kind.RECV_BACKWARD: "receiving a gradient",
    Kind.UNSHARD: "unshard",
    Kind.RESHARD: "reshard",
    Kind.REDUCE: "reduce",
}


def turns_of(spans: Sequence[Span]) -> dict[int, int]:
    """Stage -> its number among the stages of the rank, from 0: which turn of the pipeline it belongs to."""
    stages = sorted({span.action.stage for span in spans if span.action.kind in COMPUTE})
    return {stage: turn for turn, stage in enumerate(stages)}


def short_label(action: Action, turn: int) -> str:
    """Kind and micro-batch; small letters from the second turn on, and primes from the third: F3, f3, f3', f3''."""
    kind = action.kind.value if turn == 0 else action.kind.value.lower()
    micro_batch = "" if action.micro_batch is None else action.micro_batch
    return f"{kind}{micro_batch}" + "'" * (turn - 1)


def long_label(span: Span, rank: int, start: float, unit: str) -> str:
    """What a reader sees who points at an action."""
    action = span.action
    micro_batch = "" if action.micro_batch is None else f", micro-batch {action.micro_batch}"
    return (
        f"{action}: {MEANINGS[action.kind]}, stage {action.stage}{micro_batch}; rank {rank}, "
        f"{number(span.start - start)} to {number(span.end - start)}{unit}, took {number(span.duration)}{unit}"
    )


def number(value: float) -> str:
    """A time or a count to four digits, without zeros at the end."""
    return f"{value:.4g}" if abs(value) < 10000 else f"{value:.0f}"


def busiest(timeline: Timeline) -> str:
    """Which rank computes longest, unless all do."""
    if min(timeline.busy) > 0.99 * max(timeline.busy):
        return "all ranks equally busy"
    return f"rank {timeline.critical_rank} is the busiest"


def summary_line(timeline: Timeline, unit: str = "") -> str:
    """Step time, the bubble, the busiest rank and the most activations held."""
    live = " ".join(number(peak) for peak in timeline.peak_live())
    return (
        f"step {number(timeline.makespan)}{unit}, bubble {timeline.bubble_share:.1%} of the ranks' time, "
        f"{busiest(timeline)}, live activations {live}"
    )
