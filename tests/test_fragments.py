"""What an optimizer holds in place of a parameter: right element by element, refused where elements are added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_dist import ShardedStrategy, TensorParallelStrategy, ZeROStrategy
from lightning_dist.core.errors import PeerLostError, ShardedGradientError
from lightning_dist.params.fragment import REDUCTIONS, Fragment
from tests.harness import ranks
from tests.lit import Regressor, assert_same_weights, loader, trainer_alone, trainer_on_ranks, weights
from tests.pp.lit import Small, points
from tests.tp.lit import assert_same

PLAN = {"blocks.*.0": "colwise", "head": "colwise"}


class Trained(Small):
    """One step of each kind of use of the optimizer's groups."""

    use: Callable[[Any], object] = staticmethod(lambda optimizer: None)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        type(self).use(optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer)


def held(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


REFUSED: dict[str, Callable[[Any], object]] = {
    "clip_grad_norm_": lambda o: nn.utils.clip_grad_norm_(held(o), 0.1),
    "clip_grad_norm_ foreach": lambda o: nn.utils.clip_grad_norm_(held(o), 0.1, foreach=True),
    "get_total_norm": lambda o: nn.utils.get_total_norm([p.grad for p in held(o)]),
    "norm of a weight": lambda o: [p.norm() for p in held(o)],
    "norm of a gradient": lambda o: [torch.norm(p.grad) for p in held(o)],
    "mean": lambda o: [p.detach().abs().mean() if not isinstance(p, Fragment) else p.mean() for p in held(o)],
    "largest": lambda o: [p.grad.max() for p in held(o) if p.numel()],
}


@ranks(2)
@pytest.mark.parametrize("name", ["zero1", "zero3", "tp"])
@pytest.mark.parametrize("use", REFUSED)
def test_what_adds_up_elements_is_refused(use: str, name: str) -> None:
    strategy = TensorParallelStrategy(tp_plan=PLAN) if name == "tp" else ZeROStrategy(int(name[-1]))

    class Uses(Trained):
        pass

    Uses.use = staticmethod(REFUSED[use])
    with pytest.raises((ShardedGradientError, PeerLostError), match=r"strategy\.clip_grad_norm.*grad_norms.*gathered"):
        trainer_on_ranks(strategy, max_steps=1).fit(Uses(), points(24, 8))


def elementwise(optimizer: Any) -> None:
    """Clamps, scales, weight decay by hand, noise that is none, foreach, and what asks for shapes and flags."""
    for p in held(optimizer):
        if p.grad is None:
            continue
        p.grad.mul_(2.0).add_(p.detach(), alpha=0.01)
        p.grad = p.grad.clamp(-0.3, 0.3) + 0.0 * torch.ones_like(p)
        with torch.no_grad():
            p.mul_(0.99)
        assert p.shape == p.grad.shape and p.requires_grad and p.is_leaf and p.grad.isfinite().all()
    gradients = [p.grad for p in held(optimizer) if p.grad is not None]
    torch._foreach_mul_(gradients, 0.5)
    nn.utils.clip_grad_value_(held(optimizer), 0.1)


class Elementwise(Trained):
    use = staticmethod(elementwise)


@ranks(2)
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3", "tp"])
def test_what_is_done_element_by_element_equals_one_process(name: str) -> None:
    strategy: ShardedStrategy
    strategy = TensorParallelStrategy(tp_plan=PLAN) if name == "tp" else ZeROStrategy(int(name[-1]))
    share = {} if name == "tp" else {"replicas": 2, "replica": strategy_rank()}
    module, alone = Elementwise(), Elementwise()
    trainer = trainer_on_ranks(strategy, max_epochs=1)
    trainer.fit(module, points(24, 8, **share))
    trainer_alone(max_epochs=1).fit(alone, points(24, 8))
    assert assert_same(trainer, module, alone) > 10


def strategy_rank() -> int:
    return torch.distributed.get_rank()


class SharpnessAware(Regressor):
    """Two forwards and backwards in a step, with a write into the optimizer's groups before each."""

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), lr=0.02))
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            steps = [0.05 * p.grad for p in held(optimizer)]
            for p, step in zip(held(optimizer), steps, strict=True):
                p.add_(step)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, step in zip(held(optimizer), steps, strict=True):
                p.sub_(step)
        optimizer.step()


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_writes_between_two_forwards_of_a_step_count(stage: int) -> None:
    module, alone = SharpnessAware(), SharpnessAware()
    trainer, single = trainer_on_ranks(stage, max_epochs=1), trainer_alone(max_epochs=1)
    trainer.fit(module, loader())
    single.fit(alone, loader(alone=True))
    assert_same_weights(weights(trainer, module), weights(single, alone))


class GrowsLate(Regressor):
    """Adds a group to an Adam that has state, as `BaseFinetuning` does."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([self.first.bias], lr=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 1:
            self.optimizers().add_param_group({"params": [self.last.weight]})  # type: ignore[union-attr]


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_group_that_is_added_to_an_optimizer_with_state(stage: int) -> None:
    module, alone = GrowsLate(), GrowsLate()
    trainer, single = trainer_on_ranks(stage, max_epochs=1), trainer_alone(max_epochs=1)
    trainer.fit(module, loader())
    single.fit(alone, loader(alone=True))
    assert_same_weights(weights(trainer, module), weights(single, alone))


class LooksByNumPy(Regressor):
    """Keeps an array of a layer's weights from within the step."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.append("array")
        self.kept: np.ndarray[Any, Any] = self.blocks[0].up.weight.detach().cpu().numpy()  # type: ignore[index, union-attr]
        return loss


@ranks(2)
def test_an_array_of_a_parameter_outlives_its_gather() -> None:
    module, alone = LooksByNumPy(), LooksByNumPy()
    trainer, single = trainer_on_ranks(3, max_epochs=1), trainer_alone(max_epochs=1)
    trainer.fit(module, loader())
    single.fit(alone, loader(alone=True))
    assert module.kept.shape == (16, 8)
    assert_same_weights(weights(trainer, module), weights(single, alone))


def test_the_table_of_reductions() -> None:
    assert {
        torch.Tensor.norm,
        torch.linalg.vector_norm,
        torch._foreach_norm,
        torch.Tensor.mean,
        torch.sum,
    } <= REDUCTIONS
    assert not {torch.Tensor.mul_, torch.Tensor.clamp, torch.add, torch.Tensor.copy_} & REDUCTIONS
    whole = nn.Parameter(torch.arange(3.0))
    fragment = Fragment(whole.detach(), whole, partial=False)
    fragment.grad = torch.ones(3)
    assert torch.equal(fragment.detach().norm(), whole.detach().norm()) and type(fragment.grad) is Tensor
    part = Fragment(whole.detach()[:2], whole, partial=True)
    part.grad = torch.ones(2)
    with pytest.raises(ShardedGradientError, match="norm of what an optimizer holds"):
        part.grad.norm()
    assert type(part.grad + 1) is Tensor and type(part.own_gradient) is Tensor and part == whole
