"""`Trainer(strategy="tp2_pp2_zero1")` and its family: whatever holds under each kind holds under all at once."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.optim import LBFGS

from lightning_dist import HybridStrategy, ShardedStrategy
from lightning_dist.core.errors import ConfigurationError, UnsupportedOptimizerError
from lightning_dist.core.layout import HYBRID_NAMES, Layout, balanced_layout, explain_sizes
from tests.harness import rank, ranks
from tests.lit import told, trainer_alone, trainer_on_ranks
from tests.pp.lit import Lit, Small, everywhere, points, texts
from tests.test_pipeline_trainer import assert_same_numbers
from tests.tp.lit import assert_same

PLAN = {"blocks.*.0": "colwise", "head": "colwise", "first": "colwise"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2_pp2": {"tp": 2, "pp": 2, "zero": 0},
    "tp2_zero1": {"tp": 2, "zero": 1},
    "tp2_zero2": {"tp": 2, "zero": 2},
    "tp2_zero3": {"tp": 2, "zero": 3},
    "pp2_zero1": {"pp": 2, "zero": 1},
    "pp2_zero2": {"pp": 2, "zero": 2},
    "pp2_zero3": {"pp": 2, "zero": 3},
}


def hybrid(name: str, **options: Any) -> HybridStrategy:
    return HybridStrategy(**{**LAYOUTS[name], "num_microbatches": 4, "check_replicas_every": 1, **options})


def share(strategy: ShardedStrategy) -> dict[str, int]:
    layout = strategy.layout
    return {"replicas": layout.dp, "replica": layout.coordinates(rank())["dp"]}


def both(
    make: Callable[[], L.LightningModule], strategy: ShardedStrategy, data: Any = points, **options: Any
) -> tuple[L.Trainer, Any, L.Trainer, Any]:
    """Over the ranks and alone, on the same global batches of 8."""
    module, alone = make(), make()
    theirs = trainer_alone(**copy.deepcopy(options))
    ours = trainer_on_ranks(strategy, **options)
    ours.fit(module, data(24, 8, **share(strategy)), data(8, 8, **share(strategy)))
    theirs.fit(alone, data(24, 8), data(8, 8))
    return ours, module, theirs, alone


@ranks(4)
@pytest.mark.parametrize("model", ["llama_tied", "gpt2"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_fit_equals_one_process(name: str, model: str) -> None:
    """Language models, validation and metrics; layouts take turns with sequence parallelism, clipping, accumulation."""
    turn = list(LAYOUTS).index(name)
    options: dict[str, Any] = {"gradient_clip_val": 0.05} if turn % 2 else {"accumulate_grad_batches": 2}
    strategy = hybrid(name, sequence_parallel=turn % 3 == 0)
    ours, module, theirs, alone = both(lambda: Lit(model), strategy, texts, max_epochs=2, **options)
    assert ours.global_step == theirs.global_step == (6 if turn % 2 else 4)
    assert assert_same(ours, module, alone) > 10
    assert_same_numbers(ours, theirs)
    assert ours.validate(module, texts(8, 8, **share(strategy)), verbose=False)[0]["val"] == pytest.approx(
        theirs.validate(alone, texts(8, 8), verbose=False)[0]["val"], rel=1e-9
    )


class Planned(Small):
    """The small module with a plan of its own."""

    tp_plan = PLAN


@ranks(4)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision(name: str, precision: Any) -> None:
    """The loss falls, on every rank alike, in the dtype asked for."""
    strategy = hybrid(name)
    trainer = trainer_on_ranks(strategy, max_epochs=4, precision=precision)
    module = Planned().float()
    data = points(24, 8, **share(strategy))
    data.dataset.tensors = tuple(tensor.float() for tensor in data.dataset.tensors)
    trainer.validate(module, data, verbose=False)
    before = float(trainer.callback_metrics["val"])
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    after = everywhere(trainer, float(trainer.callback_metrics["val"]))
    assert len(set(after)) == 1
    assert after[0] < before
    dtypes = {value.dtype for value in strategy.full_state_dict().values()}
    assert dtypes == {torch.float32 if precision == "bf16-mixed" else torch.bfloat16}


@ranks(4)
@pytest.mark.parametrize("name", ["tp2_pp2", "pp2_zero3"])
def test_callbacks_act_alike_on_all_ranks(name: str, tmp_path: Path) -> None:
    strategy = hybrid(name)
    best = ModelCheckpoint(tmp_path / name, monitor="val", save_top_k=1)
    stop = EarlyStopping("val", patience=1, min_delta=10.0)
    trainer = trainer_on_ranks(strategy, max_epochs=9, callbacks=[best, stop], enable_checkpointing=True)
    module = Planned()
    trainer.fit(module, points(24, 8, **share(strategy)), points(8, 8, **share(strategy)))
    said = everywhere(trainer, (trainer.current_epoch, best.best_model_path, float(best.best_model_score or 0)))
    assert len(set(said)) == 1
    assert trainer.current_epoch == 2
    alone = Planned()
    saved = torch.load(best.best_model_path, weights_only=False)
    alone.load_state_dict(saved["state_dict"])
    got = trainer_alone().validate(alone, points(8, 8), verbose=False)[0]["val"]
    assert got == pytest.approx(float(best.best_model_score or 0), rel=1e-9)
    predictions = trainer.predict(module, points(8, 8, **share(strategy)))
    assert predictions is not None
    assert sum(len(part) for part in predictions) == 8 // strategy.layout.dp


MAKERS: dict[str, Callable[[], ShardedStrategy] | None] = {
    "single": None,
    **{name: lambda name=name: hybrid(name) for name in ("tp2_pp2", "pp2_zero1", "tp2_zero3", "pp2_zero3")},  # type: ignore[misc]
}


def trained(kind: str, epochs: int, path: Path | None = None) -> tuple[L.Trainer, Planned]:
    make = MAKERS[kind]
    module = Planned()
    if make is None:
        trainer = trainer_alone(max_epochs=epochs)
        trainer.fit(module, points(24, 8), ckpt_path=path)
    else:
        strategy = make()
        trainer = trainer_on_ranks(strategy, max_epochs=epochs)
        trainer.fit(module, points(24, 8, **share(strategy)), ckpt_path=path)
    return trainer, module


def everything(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Tensor]:
    """Whole weights and both moments, on every rank."""
    strategy = trainer.strategy
    if not isinstance(strategy, ShardedStrategy):
        state, moments = module.state_dict(), trainer.optimizers[0].state_dict()["state"]
    else:
        mine = strategy.full_state_dict(), strategy.optimizer_state(trainer.optimizers[0])["state"]
        state, moments = strategy.broadcast(mine if rank() == 0 else ({}, {}))
    assert len(moments) == len(list(module.parameters()))
    return {**state, **{f"{n}.{key}": value for n, kept in moments.items() for key, value in kept.items()}}


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12, msg=name)


@ranks(4)
def test_every_layout_resumes_what_every_other_wrote(tmp_path: Path) -> None:
    """Weights and moments after an epoch, and after one more under another layout, equal the uninterrupted run's."""
    first, second = (everything(*trained("single", epochs)) for epochs in (1, 2))
    for kind in MAKERS:
        trainer, module = trained(kind, 1)
        same(everything(trainer, module), first)
        if MAKERS[kind] is not None or rank() == 0:
            trainer.save_checkpoint(tmp_path / f"{kind}.ckpt")
    torch.distributed.barrier()
    pairs = 0
    for writer, reader in itertools.permutations(MAKERS, 2):
        same(everything(*trained(reader, 2, tmp_path / f"{writer}.ckpt")), second)
        pairs += 1
    assert pairs == 20


@ranks(2)
def test_a_module_goes_from_one_layout_to_another() -> None:
    module, alone = Planned(), Planned()
    for name in ("tp2", "pp2", "zero3", "tp2"):
        strategy = {
            "tp2": HybridStrategy(tp=2, zero=0),
            "pp2": HybridStrategy(pp=2, zero=0, num_microbatches=2),
            "zero3": HybridStrategy(tp=1, pp=1, zero=3),
        }[name]
        trainer = trainer_on_ranks(strategy, max_epochs=1)
        trainer.fit(module, points(24, 8, **share(strategy)))
        trainer_alone(max_epochs=1).fit(alone, points(24, 8))
        assert assert_same(trainer, module, alone) > 10


@ranks(4)
def test_names_and_the_line_at_setup() -> None:
    expected = {"3d": Layout(tp=2, pp=2), "tp2_zero1": Layout(tp=2, dp=2), "pp2_zero3": Layout(pp=2, dp=2)}
    for name, layout in expected.items():
        strategy = HybridStrategy(**HYBRID_NAMES[name])  # type: ignore[arg-type]
        with told() as lines:
            trainer = trainer_on_ranks(strategy, max_steps=1)
            trainer.fit(Planned(), points(24, 8, **share(strategy)))
        assert strategy.layout == layout
        if rank() == 0:
            assert any(f"zero{HYBRID_NAMES[name]['zero']} over {layout.dp} ranks" in line for line in lines), lines
            assert (layout.pp > 1) == any("micro-batches" in line for line in lines)
            assert (name == "3d") == any("tp2_pp2_zero1" in line for line in lines)


def test_names_cover_the_family() -> None:
    assert HYBRID_NAMES["tp2_pp4_zero1"] == {"tp": 2, "pp": 4, "zero": 1}
    assert HYBRID_NAMES["tp8_pp16"] == {"tp": 8, "pp": 16, "zero": 0}
    assert HYBRID_NAMES["pp2_zero3"] == {"pp": 2, "zero": 3}
    assert len(HYBRID_NAMES) == 4 + 3 * 4 * 4 + 3 * 3 + 4 * 3 == 73
    with pytest.raises(ConfigurationError, match=r'"tp2_pp2_zero1".*HybridStrategy\(tp=, pp=, zero=\)'):
        L.Trainer(strategy="tp2_pp3_zero9", accelerator="cpu", devices=2)


@pytest.mark.parametrize(
    ("world", "node", "layout"),
    [
        (1, 1, Layout()),
        (2, 2, Layout(tp=2)),
        (4, 4, Layout(tp=2, pp=2)),
        (8, 8, Layout(tp=2, pp=2, dp=2)),
        (16, 8, Layout(tp=4, pp=2, dp=2)),
        (64, 8, Layout(tp=4, pp=4, dp=4)),
        (6, 6, Layout(tp=2, pp=3)),
        (4, 1, Layout(pp=2, dp=2)),
    ],
)
def test_the_balanced_layout(world: int, node: int, layout: Layout) -> None:
    assert balanced_layout(world, node) == layout


def test_a_layout_draws_itself() -> None:
    assert str(Layout(tp=2, dp=2, pp=2)).splitlines() == [
        "8 ranks: tp 2, dp 2, pp 2",
        "         replica 0  replica 1",
        "stage 0  [0 1]      [2 3]",
        "stage 1  [4 5]      [6 7]",
    ]
    assert str(Layout(tp=4)).splitlines() == ["4 ranks: tp 4, dp 1, pp 1", "[0 1 2 3]"]


def test_sizes_that_do_not_fill_the_world_are_told_what_does() -> None:
    said = explain_sizes(3, 2, 8)
    assert said.endswith("does not divide the 8 ranks of this run; use tp=1 pp=2, tp=2 pp=2, tp=4 pp=2")
    strategy = HybridStrategy(tp=3, pp=2)
    strategy.parallel_devices = [torch.device("cpu")] * 4
    with pytest.raises(ConfigurationError, match="tp=3 times pp=2 does not divide the 4 ranks"):
        _ = strategy.layout
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"stage": 1}, "zero=1"),
        ({"zero": 4}, "zero=4"),
        ({"tp": 0}, "tp=0"),
        ({"pp": 1.5}, "pp=1.5"),
    ]
    for wrong, words in wrongs:
        with pytest.raises(ConfigurationError, match=words):
            HybridStrategy(**wrong)


class Closed(Planned):
    """An optimizer that needs all parameters in one place."""

    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters())


@ranks(2)
def test_what_a_pipeline_refuses_is_refused_only_there() -> None:
    strategy = HybridStrategy(pp=2, num_microbatches=2)
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS"):
        trainer_on_ranks(strategy, max_epochs=1).fit(Closed(), points(24, 8))
    strategy = HybridStrategy(tp=2)
    trainer_on_ranks(strategy, max_steps=1).fit(Planned(), points(24, 8))
    with pytest.raises(ConfigurationError, match="no stages"):
        _ = strategy.pipeline


def used_up(name: str) -> weakref.ref[Any]:
    """The mesh of a strategy that has trained."""
    strategy = hybrid(name)
    trainer_on_ranks(strategy, max_steps=1).fit(Planned(), points(24, 8, **share(strategy)))
    return weakref.ref(strategy.mesh)


@ranks(4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_outlives_the_trainer(name: str) -> None:
    """Graphs of steps that were left halfway, and of fakes, hold nothing: groups have threads, and memory adds up."""
    mesh = used_up(name)
    gc.collect()
    assert mesh() is None
