"""Checkpoints under tensor parallelism: what one process writes, and read by any strategy on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dist import ShardedStrategy, TensorParallelStrategy, ZeROStrategy
from lightning_dist.core.errors import RankMismatchError
from tests.harness import rank, ranks, world_size
from tests.lit import trainer_alone, trainer_on_ranks
from tests.tp.lit import Lit, fit_both, texts, whole_weights

KINDS: dict[str, tuple[int, Callable[[], ShardedStrategy] | None]] = {
    "tp on 2": (2, TensorParallelStrategy),
    "tp on 4": (4, TensorParallelStrategy),
    "tp2 x dp2": (4, lambda: TensorParallelStrategy(tp=2)),
    "sequence parallel on 3": (3, lambda: TensorParallelStrategy(tp=3, sequence_parallel=True)),
    "zero3 on 2": (2, lambda: ZeROStrategy(3)),
    "one process": (2, None),
}
"""name -> (ranks, strategy; None for each rank by itself)"""


class Tokens(Lit):
    """The model without attention, whose heads three ranks could not share."""

    def __init__(self) -> None:
        super().__init__("hand_written", groups)
        for block in self.model.blocks:  # type: ignore[union-attr]
            block.attention = torch.nn.Identity()
        self.tp_plan = {k: v for k, v in self.tp_plan.items() if "attention" not in k}  # type: ignore[union-attr]


def groups(module: Any) -> torch.optim.Optimizer:
    """Two groups, in another order than the module's."""
    parameters = list(module.parameters())
    small = [p for p in parameters if p.ndim == 1]
    large = [p for p in reversed(parameters) if p.ndim > 1]
    return torch.optim.AdamW([{"params": small, "weight_decay": 0.0}, {"params": large}], lr=1e-2)


def trained(kind: str, epochs: int, path: str | None = None) -> tuple[L.Trainer, Tokens]:
    make = KINDS[kind][1]
    strategy = None if make is None else make()
    trainer = trainer_alone(max_epochs=epochs) if strategy is None else trainer_on_ranks(strategy, max_epochs=epochs)
    if isinstance(strategy, TensorParallelStrategy):
        replicas = world_size() // (strategy.tp or world_size())
    else:
        replicas = 1 if strategy is None else world_size()
    module = Tokens()
    data = texts(24, 12, replicas=replicas, replica=rank() // (world_size() // replicas))
    trainer.fit(module, data, ckpt_path=path)
    return trainer, module


def everything(trainer: L.Trainer, module: Tokens) -> dict[str, Tensor]:
    """Whole weights and moments, on every rank."""
    if not isinstance(trainer.strategy, ShardedStrategy):
        values = {n: p.detach().clone() for n, p in module.named_parameters()}
        state = trainer.optimizers[0].state_dict()["state"]
        return values | {f"{n}.{k}": v for n, s in state.items() for k, v in s.items()}
    values = whole_weights(trainer, module)
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]
    moments = {f"{n}.{k}": v for n, s in state.items() for k, v in s.items()}
    shared: dict[str, Tensor] = trainer.strategy.broadcast(moments if rank() == 0 else {})
    return values | shared


def write(kind: str, path: str) -> tuple[dict[str, Tensor], list[float]]:
    trainer, module = trained(kind, 1)
    if KINDS[kind][1] is not None or rank() == 0:
        trainer.save_checkpoint(path)
    return everything(trainer, module), module.losses


def read(kind: str, path: str) -> tuple[dict[str, Tensor], list[float]]:
    """As loaded, and the losses of an epoch after it: means over the ranks."""
    trainer, module = trained(kind, 1, path)
    loaded = everything(trainer, module)
    assert module.losses == []
    trainer, module = trained(kind, 2, path)
    losses = torch.tensor(module.losses)
    if isinstance(trainer.strategy, ShardedStrategy):
        losses = trainer.strategy.reduce(losses)
    return loaded, losses.tolist()


@pytest.mark.parametrize("maker", KINDS)
def test_any_strategy_resumes_what_any_other_wrote(maker: str, tmp_path: Path, rank_pools: Any) -> None:
    path = str(tmp_path / "made.ckpt")
    wrote = rank_pools.run(write, KINDS[maker][0], timeout=120, arguments={"kind": maker, "path": path})
    values = wrote[0][0]
    assert len(values) == 4 * len(list(Tokens().parameters()))
    following: list[list[float]] = []
    for reader, (world, _) in KINDS.items():
        for loaded, losses in rank_pools.run(read, world, timeout=120, arguments={"kind": reader, "path": path}):
            assert loaded.keys() == values.keys()
            for key, value in values.items():
                assert loaded[key].dtype == value.dtype
                assert torch.equal(loaded[key], value), (reader, key)
            following.append(losses)
    assert len(following) == sum(world for world, _ in KINDS.values())
    for losses in following:
        assert len(losses) == 2
        assert losses == pytest.approx(following[0], rel=1e-6)


@ranks(2, 4)
@pytest.mark.parametrize("name", ["hand_written", "llama_tied", "mixtral", "phi3"])
def test_checkpoint_is_what_one_process_writes(name: str, tmp_path: Path) -> None:
    trainer, _, alone, reference = fit_both(lambda: Lit(name, groups), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    if rank():
        return
    alone.save_checkpoint(tmp_path / "alone.ckpt")
    got, want = (torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in ("ours", "alone"))
    assert got.keys() == want.keys()
    assert list(got["state_dict"]) == list(want["state_dict"])
    for key, value in want["state_dict"].items():
        assert type(got["state_dict"][key]) is Tensor
        torch.testing.assert_close(got["state_dict"][key], value, rtol=1e-9, atol=1e-9)
    mine, theirs = got["optimizer_states"][0], want["optimizer_states"][0]
    assert mine["param_groups"] == theirs["param_groups"]
    assert list(mine["state"]) == list(theirs["state"])
    for number, state in theirs["state"].items():
        assert mine["state"][number].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][number][key], value, rtol=1e-7, atol=1e-9)
    loaded = Lit.load_from_checkpoint(tmp_path / "ours.ckpt", name=name)
    for parameter, other in zip(loaded.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-9, atol=1e-9)


@ranks(2, 4)
def test_model_checkpoint_keeps_best_and_last(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, monitor="val", save_top_k=2, save_last=True)
    every = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=2, save_top_k=-1)
    strategy = TensorParallelStrategy(tp=2)
    trainer = trainer_on_ranks(strategy, max_epochs=3, callbacks=[keep, every], enable_checkpointing=True)
    share = {"replicas": world_size() // 2, "replica": rank() // 2}
    module = Lit()
    trainer.fit(module, texts(**share), texts(8, **share))
    assert len(list(tmp_path.glob("epoch*.ckpt"))) == 2
    assert len(list((tmp_path / "steps").glob("*.ckpt"))) == 6
    said = strategy.mesh.rollcall.exchange((keep.best_model_path, float(keep.best_model_score or 0)))
    assert len(set(said)) == 1
    best = trainer.test(module, texts(8, **share), ckpt_path="best", verbose=False)
    saved = torch.load(keep.best_model_path, weights_only=False)["state_dict"]
    for name, value in whole_weights(trainer, module).items():
        assert torch.equal(value, saved[name])
    assert best[0]["test"] == pytest.approx(float(keep.best_model_score or 0), rel=1e-6)


@ranks(2)
def test_saving_on_one_rank_only_is_an_error_not_a_hang(tmp_path: Path) -> None:
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if rank() == 0:
                trainer.save_checkpoint(tmp_path / "alone.ckpt")

    with pytest.raises(RankMismatchError, match="saving a checkpoint"):
        trainer_on_ranks(TensorParallelStrategy(), max_steps=2, callbacks=[Saves()]).fit(Lit(), texts())


@ranks(2)
def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    trainer = trainer_on_ranks(TensorParallelStrategy(), max_steps=1)
    trainer.fit(Lit("llama"), texts())
    trainer.save_checkpoint(tmp_path / "llama.ckpt")
    with pytest.raises(RuntimeError, match=r"size mismatch.*embed_tokens|embed_tokens.*shape"):
        trainer_on_ranks(TensorParallelStrategy()).validate(
            Wider(), texts(8), ckpt_path=tmp_path / "llama.ckpt", verbose=False
        )


class Wider(Lit):
    """Other sizes under the same names."""

    def __init__(self) -> None:
        super().__init__("llama")
        import transformers

        from tests.tp.models import DECODER

        config = transformers.LlamaConfig(**{**DECODER, "vocab_size": 39})
        self.model = transformers.LlamaForCausalLM(config).double()
