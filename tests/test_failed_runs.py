"""After a run that failed, on all ranks or on one of them, the same Trainer runs again with the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist import PipelineParallelStrategy, ShardedStrategy, TensorParallelStrategy, ZeROStrategy
from lightning_dist.core.errors import PeerLostError, RankMismatchError
from tests.harness import rank, ranks, world_size
from tests.lit import trainer_alone, trainer_on_ranks
from tests.pp.lit import Small, everywhere, points

PLAN = {"blocks.*.0": "colwise", "head": "colwise", "first": "colwise"}
STRATEGIES: dict[str, Callable[[], ShardedStrategy]] = {
    **{f"zero{stage}": lambda stage=stage: ZeROStrategy(stage) for stage in range(4)},  # type: ignore[misc]
    "tp": lambda: TensorParallelStrategy(tp_plan=PLAN),
    "pp": lambda: PipelineParallelStrategy(num_microbatches=4),
    "zbv": lambda: PipelineParallelStrategy(num_microbatches=4, schedule="zbv"),
}


class Fault(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyError("on purpose")


class Fails(Small):
    """Fails at the third batch of the second epoch, on the ranks named and at the place named."""

    ranks: tuple[int, ...] = ()
    place = ""

    def _here(self, place: str) -> bool:
        now = (self.current_epoch, self.trainer.fit_loop.batch_idx) == (1, 1)
        return place == self.place and now and rank() in self.ranks

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if number in (1, 3, 6) and self._here("forward"):
                raise KeyError("on purpose")
        y: Tensor = self.head(x)
        return y

    def training_step(self, batch: Any, index: int) -> Any:
        if self._here("step"):
            raise KeyError("on purpose")
        return super().training_step(batch, index)

    def on_after_backward(self) -> None:
        if self._here("after backward"):
            raise KeyError("on purpose")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self._here("optimizer"):
            raise KeyError("on purpose")

    def validation_step(self, batch: Any, index: int) -> Any:
        if self.place == "validation" and index == 1 and rank() in self.ranks:
            raise KeyError("on purpose")
        return super().validation_step(batch, index)


class FailsInBackward(Fails):
    """The same in the middle of backward."""

    place = "backward"

    def __init__(self) -> None:
        super().__init__()
        for block in (self.blocks[1], self.blocks[3], self.blocks[6]):  # every rank has one, whatever the schedule
            block.register_forward_hook(self._plant)  # type: ignore[arg-type]

    def _plant(self, block: nn.Module, args: Any, output: Tensor) -> Tensor:
        planted: Tensor = Fault.apply(output) if self._here("backward") else output  # type: ignore[no-untyped-call]
        return planted


def data(strategy: ShardedStrategy) -> Any:
    layout = strategy.layout
    return points(32, 8, replicas=layout.dp, replica=layout.coordinates(rank())["dp"])


def whole_weights(strategy: ShardedStrategy) -> dict[str, Tensor]:
    """On every rank."""
    said: Any = strategy.mesh.rollcall.broadcast(strategy.full_state_dict())
    return said


def fails(run: Callable[[], object], failing: tuple[int, ...]) -> None:
    """`run` fails with its own error on these ranks (one of them, if they are not at it together), and else by it."""
    with pytest.raises((KeyError, PeerLostError), match="on purpose") as caught:
        run()
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, caught.type is KeyError)
    own = {number for number, itself in enumerate(everyone) if itself}
    assert own
    assert own <= set(failing)


def same(got: dict[str, Tensor], want: nn.Module) -> None:
    for name, value in want.state_dict().items():
        assert torch.allclose(got[name], value, rtol=1e-9, atol=1e-12), name


@ranks(2)
@pytest.mark.parametrize("who", ["all", "last"])
@pytest.mark.parametrize("place", ["step", "forward", "backward", "after backward"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("zero0", "zero2"))) for name in STRATEGIES]
)
def test_fitting_again_from_a_checkpoint(name: str, place: str, who: str, tmp_path: Path) -> None:
    """Nothing of the failed step is left: no message, no gather, no gradient, no released layer."""
    strategy = STRATEGIES[name]()
    module: Fails = FailsInBackward() if place == "backward" else Fails()
    module.ranks = tuple(range(world_size())) if who == "all" else (world_size() - 1,)
    module.place = place
    alone = copy.deepcopy(module)
    alone.ranks = ()
    trainer = trainer_on_ranks(strategy, max_epochs=1)
    trainer.fit(module, data(strategy))
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    trainer.fit_loop.max_epochs = 2
    fails(lambda: trainer.fit(module, data(strategy)), module.ranks)
    module.ranks = ()
    trainer.fit(module, data(strategy), ckpt_path=tmp_path / "first.ckpt")
    trainer_alone(max_epochs=2).fit(alone, points(32, 8))
    assert everywhere(trainer, trainer.global_step) == [8] * world_size()
    same(whole_weights(strategy), alone)


@ranks(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_another_loop_after_one_rank_failed(name: str) -> None:
    strategy = STRATEGIES[name]()
    module = Fails()
    alone = copy.deepcopy(module)
    trainer, single = trainer_on_ranks(strategy), trainer_alone()
    module.place, module.ranks = "validation", (0,)
    fails(lambda: trainer.validate(module, data(strategy), verbose=False), (0,))
    module.place = ""
    for _ in range(2):
        got = trainer.validate(module, data(strategy), verbose=False)
    assert got[0] == pytest.approx(single.validate(alone, points(32, 8), verbose=False)[0], rel=1e-9)


class RunsOut(Small):
    """Takes from an iterator that is at its end too early, on one rank."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        if rank() == 1 and index == 1:
            next(iter([]))
        return loss

    def validation_step(self, batch: Any, index: int) -> Any:
        return self.training_step(batch, index)


@ranks(2, timeout=60)
@pytest.mark.parametrize("call", ["fit", "validate"])
@pytest.mark.parametrize("name", ["zero1", "tp", "pp"])
def test_a_stop_iteration_in_a_step_is_not_the_end_of_the_epoch(name: str, call: str) -> None:
    strategy = STRATEGIES[name]()
    trainer = trainer_on_ranks(strategy, max_epochs=1)
    with pytest.raises(RuntimeError if rank() == 1 else PeerLostError, match="raised StopIteration"):
        getattr(trainer, call)(RunsOut(), data(strategy))


@ranks(2)
@pytest.mark.parametrize("name", ["zero1", "zero3", "tp", "pp"])
def test_parts_of_different_steps_are_not_trained_on(name: str) -> None:
    """One rank fails once it has stepped and the others go on for as long as they can: a checkpoint is asked for."""
    strategy = STRATEGIES[name]()
    module = Fails()
    module.place, module.ranks = "optimizer", (1,)
    trainer = trainer_on_ranks(strategy, max_epochs=2)
    fails(lambda: trainer.fit(module, data(strategy)), module.ranks)
    steps = strategy.mesh.rollcall.meet(trainer.global_step)
    assert steps == [6, 5]
    module.ranks = ()
    with pytest.raises(RankMismatchError, match=r"\[6, 5\] optimizer steps.*ckpt_path"):
        trainer.fit(module, data(strategy))
