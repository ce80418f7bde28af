"""What a schedule costs, by formula: idle time and live activations, exact for equal stages and free transfers.

Letters: p ranks, m micro-batches, v stages on each rank; F, B, I, W are the times of a micro-batch on *all* v stages
of a rank, so that one stage takes F/v and the ideal step m (F + B). `idle` is the time of a step beyond that ideal, the
same on each rank of equal work; the bubble ratio is idle / ideal, the bubble share idle / (ideal + idle).

===========  =====================================================  ===========================================
schedule     idle                                                   live activations of rank r, in stages
===========  =====================================================  ===========================================
gpipe        (p-1) (F+B)                                            m
1f1b         (p-1) (F+B)                                            min(m, p-r)
interleaved  (p-1)/v (F+B)                       for m >= p         min(m v, (v-1) n + 2 (p-1-r) + 1)
zb_h1        (p-1) (F+I-W)                       for m >= p         min(m, p)
zbv          (p-1) F/2, and 0 if steps overlap   for m >= 2p-1      min(2m, 2p)
===========  =====================================================  ===========================================

The forms of zb_h1 and zbv hold for F = I = W. In interleaved n is the size of the largest group of micro-batches: p
where p divides m, which gives the memory of the paper, p (1 + (p-1) / (p v)) whole micro-batches on rank 0.

"If steps overlap": Qi et al. count a rank's idle time between its own first and last action, since with their
optimizer (which checks for overflows afterwards) a rank need not wait for the others between two steps. `idle` here is
that of an ordinary optimizer, where the step ends for all when the last rank is done; `idle_overlapped` is theirs.

Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965); Narayanan et al. 2021 (arXiv 2104.04473, sec. 2.2); Qi et al. 2024
(arXiv 2401.10241, ZB-H1 and ZB-V). The forms for few micro-batches (m < p; m < 2p-1 for zbv) are our own: they describe
these implementations and are held by a sweep over p, m and v in the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Time of a micro-batch on all stages of a rank, in any unit: `backward` is `input_grad` + `weight_grad`."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0

    @property
    def backward(self) -> float:
        """A whole backward."""
        return self.input_grad + self.weight_grad

    @property
    def whole(self) -> float:
        """Forward and backward: what each micro-batch costs a rank, ideally."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Shape:
    """p, m and v of a schedule."""

    num_ranks: int
    num_micro_batches: int
    virtual_stages: int = 1


Idle = Callable[[Shape, Times], float]
Live = Callable[[Shape, int], int]


def idle_of_full_ramp(shape: Shape, times: Times) -> float:
    """(p-1)(F+B): the last rank waits for p-1 forwards at the start, the first for p-1 backwards at the end."""
    return (shape.num_ranks - 1) * times.whole


def idle_interleaved(shape: Shape, times: Times) -> float:
    """(p-1)/v (F+B): the ramps are made of stages, v times shorter than all stages of a rank.

    With m < p a micro-batch comes round to the first rank after p steps, of which only m have work: p - m more are
    lost on every turn but the last, which gives (v (p-m) + m-1) / v (F+B) in all.
    """
    p, m, v = shape.num_ranks, shape.num_micro_batches, shape.virtual_stages
    return (max(p - m, 0) + (min(m, p) - 1) / v) * times.whole


def idle_zb_h1(shape: Shape, times: Times) -> float:
    """(p-1)(F+I-W): weight gradients fill the gaps that wait for input gradients; at most m-1 of them exist by then."""
    p, m = shape.num_ranks, shape.num_micro_batches
    return (p - 1) * (times.forward + times.input_grad) - min(m - 1, p - 1) * times.weight_grad


def idle_zbv(shape: Shape, times: Times) -> float:
    """(p-1) F/2 for m >= p: the last rank starts that late, and is busy from then on."""
    p, m = shape.num_ranks, shape.num_micro_batches
    return max(4 * p - 1 - 4 * m, 3 * p - 1 - 2 * m, p - 1) * times.forward / 2


def idle_overlapped_zbv(shape: Shape, times: Times) -> float:
    """0 for m >= 2p-1: with fewer micro-batches there are too few weight gradients for the gaps."""
    p, m = shape.num_ranks, shape.num_micro_batches
    return max(4 * p - 1 - 4 * m, 2 * p - 1 - m, 0) * times.forward / 2


def live_gpipe(shape: Shape, rank: int) -> int:
    """All m: no backward starts before the last forward."""
    return shape.num_micro_batches


def live_one_f_one_b(shape: Shape, rank: int) -> int:
    """min(m, p-r): a rank runs ahead only until the first gradient comes back."""
    return min(shape.num_micro_batches, shape.num_ranks - rank)


def live_interleaved(shape: Shape, rank: int) -> int:
    """The warm-up and one more: v-1 turns of the largest group, then twice the way to the last rank."""
    p, m, v = shape.num_ranks, shape.num_micro_batches, shape.virtual_stages
    if v == 1:
        return live_one_f_one_b(shape, rank)
    return min(m * v, (v - 1) * max(group_sizes(p, m)) + 2 * (p - 1 - rank) + 1)


def live_zero_bubble(shape: Shape, rank: int) -> int:
    """p whole micro-batches on every rank: what 1f1b holds on its first."""
    return min(shape.num_micro_batches, shape.num_ranks) * shape.virtual_stages


def group_sizes(num_ranks: int, num_micro_batches: int) -> list[int]:
    """How interleaved divides the micro-batches into groups that turn together: as many groups of p or more as fit.

    A group of fewer than p would come round before its successor on the ring is ready and leave gaps, so what p does
    not divide is spread over the groups: 7 micro-batches on 3 ranks are groups of 4 and 3, 5 on 3 one group of 5.
    """
    count = max(num_micro_batches // num_ranks, 1)
    size, larger = divmod(num_micro_batches, count)
    return [size + (index < larger) for index in range(count)]
