"""Odd uses of autograd around cut layers equal one process: several backwards, freezing in between, writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dist.comm import Mesh
from lightning_dist.core.errors import UnsupportedModelError
from lightning_dist.core.layout import Layout
from lightning_dist.core.shard import cut_of
from lightning_dist.params.questions import without_answers
from lightning_dist.tensor import cut_module
from lightning_dist.tensor.split_tensor import SplitTensor, whole
from tests.harness import ranks, world_size

PLAN = {"up": "colwise", "gate": "colwise", "down": "rowwise"}


class Pair(nn.Module):
    """Two linears that read one input, and one behind them. Its forward never runs: uses call the layers."""

    def __init__(self, inner: int = 12) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, inner), nn.Linear(8, inner), nn.Linear(inner, 8)
        self.query = nn.Parameter(torch.randn(6, 8))
        self.register_buffer("places", torch.randn(6, 8))


def x(step: int) -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def in_place(m: Pair, step: int) -> Tensor:
    """What people write: nn.ReLU(inplace=True) behind a linear, scores that are scaled and masked in place."""
    h = m.up(x(step))
    F.relu(h, inplace=True)
    h = m.gate(x(step)) + h
    h += m.up(x(step))
    h *= 0.5
    h[:, 0] = 0.1
    h[..., 3] = 0.2
    h[h > 1.0] = 1.0
    h.mul_(2.0)
    y = m.down(h)
    y += x(step)
    y[:, 1].zero_()
    z: Tensor = y.pow(2).mean()
    return z


def inputs_that_stay(m: Pair, step: int) -> Tensor:
    """A parameter and a buffer as inputs are the same object in every step."""
    of_query = m.up(m.query) * m.gate(m.query)
    out: Tensor = m.down(torch.tanh(of_query + m.up(m.places) * m.gate(m.places))).pow(2).mean()
    return out


def by_bias_first(m: Pair, step: int) -> Tensor:
    """A backward that stops before the weights leaves nothing for the next one."""
    loss: Tensor = m.down(torch.tanh(m.up(x(step)))).pow(2).mean()
    (by,) = torch.autograd.grad(loss, [m.up.bias], retain_graph=True)
    return loss * (1 + by.pow(2).sum().detach())


def by_activation_first(m: Pair, step: int) -> Tensor:
    h = m.up(x(step))
    loss: Tensor = m.down(torch.tanh(h)).pow(2).mean()
    (by,) = torch.autograd.grad(loss, [h], retain_graph=True)
    return loss * (1 + by.pow(2).sum().detach())


def frozen_between(m: Pair, step: int) -> Tensor:
    """The same input before and after the layer is frozen."""
    same = x(step)
    m.up.requires_grad_(False)
    frozen = m.up(same)
    m.up.requires_grad_(True)
    loss: Tensor = m.down(torch.tanh(frozen) * m.up(same)).pow(2).mean()
    return loss


def input_that_is_asked_for_later(m: Pair, step: int) -> Tensor:
    same = x(step)
    first = m.up(same).sum()
    same.requires_grad_()
    loss: Tensor = m.down(m.up(same).tanh()).pow(2).mean() + 0.1 * first
    (by,) = torch.autograd.grad(loss, [same], retain_graph=True)
    return loss * (1 + by.abs().sum())


def weights_written_after_use(m: Pair, step: int) -> Tensor:
    """An input without a gradient needs no weight in backward, so that may be written meanwhile."""
    loss: Tensor = m.down(torch.tanh(m.up(x(step)))).pow(2).mean()
    with torch.no_grad():
        m.up.weight.mul_(0.9)
    return loss


USES: dict[str, Callable[[Pair, int], Tensor]] = {
    use.__name__: use
    for use in (
        in_place,
        inputs_that_stay,
        by_bias_first,
        by_activation_first,
        frozen_between,
        input_that_is_asked_for_later,
        weights_written_after_use,
    )
}


def put_together(t: Tensor | None, like: Tensor) -> Tensor | None:
    if t is None or cut_of(like) is None or isinstance(t, SplitTensor):
        return whole(t) if isinstance(t, SplitTensor) else t
    lie = like.lie  # type: ignore[attr-defined]
    return lie.axis.gather_parts(t, lie.dim, lie.split, purpose="test")  # type: ignore[no-any-return]


def assert_equal_one_process(make: Callable[[], Pair], use: Callable[[Pair, int], Tensor], *, sequence: bool) -> None:
    """Losses, gradients and weights over three steps."""
    ours, alone = make(), make()
    cut_module(ours, Mesh.from_world(Layout(tp=world_size())).tp, plan=PLAN, sequence_parallel=sequence)
    for step in range(3):
        losses = [use(module, step) for module in (ours, alone)]
        torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-12)
        for module, loss in zip((ours, alone), losses, strict=True):
            module.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        for (name, mine), (_, theirs) in zip(ours.named_parameters(), alone.named_parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                grad = put_together(mine.grad, mine)
                torch.testing.assert_close(grad, theirs.grad, rtol=1e-9, atol=1e-11, msg=f"{name}, step {step}")
        with torch.no_grad():
            for parameter in (*ours.parameters(), *alone.parameters()):
                if parameter.grad is not None:
                    without_answers(parameter).add_(parameter.grad, alpha=-0.1)


def in_float64(inner: int = 12) -> Pair:
    torch.manual_seed(3)
    return Pair(inner).double()


@ranks(2, 4)
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("name", USES)
def test_equals_one_process(name: str, sequence: bool) -> None:
    assert_equal_one_process(in_float64, USES[name], sequence=sequence)


@ranks(2, 4)
@pytest.mark.parametrize("inner", [1, 3], ids=["one", "three"])
def test_ranks_that_are_left_without_a_feature(inner: int) -> None:
    """A regression head has one output: one rank computes it."""
    assert_equal_one_process(lambda: in_float64(inner), inputs_that_stay, sequence=False)


class Normalized(nn.Module):
    """A weight that is computed whenever it is read, with a state that every reading changes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 12))
        self.down = nn.Linear(12, 8)


@ranks(2)
def test_cutting_reads_no_computed_weight() -> None:
    torch.manual_seed(3)
    module = Normalized().double()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    plan = {"fc.parametrizations.weight.original": "colwise", "down": "rowwise"}
    report = cut_module(module, Mesh.from_world(Layout(tp=2)).tp, plan=plan)
    assert len(before) == 2
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert report.whole == []


@ranks(2)
def test_a_graph_that_is_still_held_is_refused_by_name() -> None:
    """It would want gradients of the whole shape."""
    module = in_float64()
    kept = module.up(x(0))
    with pytest.raises(UnsupportedModelError, match=r"up\.weight cannot be cut: something still holds a graph"):
        cut_module(module, Mesh.from_world(Layout(tp=2)).tp, plan=PLAN)
    assert kept.requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = torch.nn.utils.weight_norm(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))[0])
    module = nn.Sequential(old, nn.Linear(12, 8))  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="parametrizations"):
        cut_module(module, Mesh.from_world(Layout(tp=2)).tp, plan={"0.weight_v": "colwise", "1": "rowwise"})
