"""Whole runs that must give what one process gives: tied models, GANs, groups, checkpoints, orders of calls."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import ZeROStrategy
from tests.harness import rank, ranks, world_size
from tests.lit import (
    Block,
    Regressor,
    assert_same_weights,
    fit_both,
    loader,
    trainer_alone,
    trainer_on_ranks,
    weights,
)
from tests.test_trainer_optimization import Gan, decay_groups

STAGES = (0, 1, 2, 3)


# Tied weights -----------------------------------------------------------------------------------------------------


class TiedGpt(L.LightningModule):
    """An embedding, causal mixing, blocks, and a head that is the embedding; records what it can count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 13, bias=False)
        self.lm_head.weight = self.embed.weight
        self.norms: list[float] = []
        self.counts: set[int] = set()
        self.double()

    def training_step(self, batch: Any, index: int) -> Tensor:
        tokens = (batch[0].abs() * 5).long() % 13
        x = self.embed(tokens[:, :-1])
        x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        for block in self.blocks:
            x = block(x)
        self.counts.add(sum(p.numel() for p in self.parameters()))
        return nn.functional.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, ZeROStrategy):
            self.norms.append(float(self.trainer.strategy.grad_norm()))
        else:
            self.norms.append(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm()))  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@ranks(2, 4)
@pytest.mark.parametrize("stage", STAGES)
def test_a_tied_gpt(stage: int, tmp_path: Path) -> None:
    trainer, ours, alone, reference = fit_both(stage, TiedGpt, max_steps=5)
    assert isinstance(ours, TiedGpt) and isinstance(reference, TiedGpt)
    assert_same_weights(weights(trainer, ours), weights(alone, reference))
    assert len(reference.norms) == 5
    assert ours.norms == pytest.approx(reference.norms, rel=1e-10)
    total = sum(p.numel() for p in TiedGpt().parameters())
    assert ours.counts == {total}
    assert sum(p.numel() for p in ours.parameters()) == total
    assert "lm_head.weight" not in dict(ours.named_parameters())
    assert ours.lm_head.weight is ours.embed.weight
    state = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    assert set(state) == set(reference.state_dict())
    assert state["lm_head.weight"] is state["embed.weight"]
    trainer.save_checkpoint(tmp_path / "tied.ckpt")
    if rank() == 0:
        assert torch.allclose(state["lm_head.weight"], reference.lm_head.weight, rtol=1e-9)
        saved = torch.load(tmp_path / "tied.ckpt", weights_only=False)
        assert saved["state_dict"]["lm_head.weight"].data_ptr() == saved["state_dict"]["embed.weight"].data_ptr()
        moments = saved["optimizer_states"][0]["state"]
        assert sum(s["exp_avg"].numel() for s in moments.values()) == total


# Two optimizers ---------------------------------------------------------------------------------------------------


def moments_of(trainer: L.Trainer) -> list[dict[str, Tensor]]:
    """Whole optimizer state of every optimizer, on rank 0."""
    found = []
    for optimizer in trainer.optimizers:
        state = trainer.strategy.optimizer_state(optimizer)["state"]
        found.append({f"{n}.{k}": v.double() for n, s in state.items() for k, v in s.items() if torch.is_tensor(v)})
    return found


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_gan_resumes_both_optimizers_and_both_schedulers(stage: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"limit_train_batches": 5}
    first = trainer_on_ranks(stage, max_epochs=1, **options)
    first.fit(Gan(toggle=True), loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    ours, reference = Gan(toggle=True), Gan(toggle=True)
    trainer = trainer_on_ranks(stage, max_epochs=2, **options)
    trainer.fit(ours, loader(), ckpt_path=tmp_path / "half.ckpt")
    alone = trainer_alone(max_epochs=2, **options)
    alone.fit(reference, loader(alone=True))
    assert trainer.global_step == alone.global_step == 20
    assert_same_weights(weights(trainer, ours), weights(alone, reference))
    for got, want in zip(trainer.lr_scheduler_configs, alone.lr_scheduler_configs, strict=True):
        assert got.scheduler.last_epoch == want.scheduler.last_epoch == 10  # type: ignore[union-attr]
        assert got.scheduler.get_last_lr() == pytest.approx(want.scheduler.get_last_lr())  # type: ignore[union-attr]
    kinds = [type(o).__name__ for o in trainer.optimizers]
    assert kinds == ["Adam", "RMSprop"]
    for mine, theirs in zip(moments_of(trainer), moments_of(alone), strict=True):
        if rank() == 0:
            assert_same_weights(mine, theirs, rel=1e-9)


# Groups on another number of ranks -----------------------------------------------------------------------------------


class Grouped(Regressor):
    """Decay groups, the first of which is changed while training."""

    def __init__(self) -> None:
        super().__init__(decay_groups)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.optimizers().param_groups[0]["weight_decay"] = 0.25  # type: ignore[union-attr]


GLOBAL_BATCH = 8
GROUPS: dict[str, Any] = {"limit_train_batches": 3}


def groups_on_ranks(stage: int, path: str, epochs: int, resume: bool) -> Any:
    """Train to `epochs`, save; returns the weights and the groups' options."""
    module = Grouped()
    trainer = trainer_on_ranks(stage, max_epochs=epochs, **GROUPS)
    data = loader(per_rank=GLOBAL_BATCH // world_size())
    trainer.fit(module, data, ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    groups = [
        {k: g[k] for k in ("lr", "weight_decay")} | {"n": len(g["params"])} for g in trainer.optimizers[0].param_groups
    ]
    return weights(trainer, module), groups


@pytest.mark.parametrize("stage", STAGES)
def test_decay_groups_survive_another_number_of_ranks(stage: int, tmp_path: Path, rank_pools: Any) -> None:
    path = str(tmp_path / "two.ckpt")
    rank_pools.run(
        groups_on_ranks, 2, timeout=60, arguments={"stage": stage, "path": path, "epochs": 1, "resume": False}
    )
    found = rank_pools.run(
        groups_on_ranks, 4, timeout=60, arguments={"stage": stage, "path": path, "epochs": 2, "resume": True}
    )
    reference = Grouped()
    batches = DataLoader(loader_data(), batch_size=GLOBAL_BATCH)
    trainer_alone(max_epochs=2, **GROUPS).fit(reference, batches)
    for values, groups in found:
        assert [g["weight_decay"] for g in groups] == [0.25, 0.0, 0.5]
        assert [g["lr"] for g in groups] == [1e-2, 1e-2, 3e-2]
        assert [g["n"] for g in groups] == [7, 10, 2]
        assert_same_weights(values, {n: p.detach() for n, p in reference.named_parameters()})


def loader_data() -> Any:
    """What `loader` iterates over, without a world."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 8, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, torch.randn(48, 3, generator=generator, dtype=torch.float64))


# What a checkpoint holds ------------------------------------------------------------------------------------------


class Remembers(Regressor):
    """Adds and removes keys, has hyper-parameters, and a buffer."""

    def __init__(self, width: int = 8, name: str = "plain") -> None:
        super().__init__(width=width)
        self.save_hyperparameters()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.restored: object = None

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, index)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["table"] = {"norm": torch.arange(3.0), "who": self.hparams["name"]}
        checkpoint["state_dict"].pop("last.bias")
        del checkpoint["loops"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.restored = checkpoint["table"]["who"]
        checkpoint["state_dict"].pop("extra")
        checkpoint["state_dict"]["last.bias"] = torch.full((3,), 9.0, dtype=torch.float64)


class Noting(L.Callback):
    """A callback with a state of its own that edits the checkpoint too."""

    def __init__(self) -> None:
        self.batches = 0
        self.loaded: dict[str, Any] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = dict(state)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["noted"] = self.batches
        checkpoint["state_dict"]["extra"] = torch.ones(2)


def same(got: Any, want: Any, where: str = "") -> None:
    """Equal keys, types and values, tensors to 1e-9, all the way down."""
    assert type(got) is type(want), where
    if isinstance(want, dict):
        assert list(got) == list(want), where
        for key in want:
            same(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), where
        for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            same(mine, theirs, f"{where}.{index}")
    elif isinstance(want, Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape, where
        assert torch.allclose(got.double(), want.double(), rtol=1e-9, atol=1e-12), where
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=1e-9), where
    else:
        assert got == want, where


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_edited_checkpoints_are_what_one_process_writes(stage: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 3}
    trainer = trainer_on_ranks(stage, callbacks=[Noting()], **options)
    trainer.fit(Remembers(name="mine"), loader())
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    alone = trainer_alone(callbacks=[Noting()], **options)
    alone.fit(Remembers(name="mine"), loader(alone=True))
    if rank() == 0:
        alone.save_checkpoint(tmp_path / "alone.ckpt")
        got, want = (torch.load(tmp_path / f"{who}.ckpt", weights_only=False) for who in ("ours", "alone"))
        same(got, want)
        assert got["state_dict"]._metadata == want["state_dict"]._metadata
        assert want["noted"] == 3 and "loops" not in want and "last.bias" not in want["state_dict"]
        assert want["hyper_parameters"] == {"width": 8, "name": "mine"}
        for who in ("ours", "alone"):  # in one process, with the values of the checkpoint
            loaded = Remembers.load_from_checkpoint(tmp_path / f"{who}.ckpt", map_location="cpu")
            assert (loaded.hparams["name"], loaded.restored) == ("mine", "mine")
            assert int(loaded.steps) == 3  # type: ignore[arg-type]
            assert loaded.last.bias.tolist() == [9.0] * 3
            assert torch.equal(
                loaded.first.weight,
                torch.load(tmp_path / f"{who}.ckpt", weights_only=False)["state_dict"]["first.weight"],
            )
    trainer.strategy.barrier()
    note, module = Noting(), Remembers()
    reader = trainer_on_ranks(stage, callbacks=[note])
    reader.validate(module, loader(), ckpt_path=tmp_path / "ours.ckpt", verbose=False)
    assert note.loaded == {"batches": 3}
    assert module.restored == "mine"
    assert weights(reader, module)["last.bias"].tolist() == [9.0] * 3


class Plain(Regressor):
    """Hyper-parameters, and nothing else of its own."""

    def __init__(self, width: int = 8, rate: float = 1e-2) -> None:
        super().__init__(lambda m: torch.optim.AdamW(m.parameters(), lr=rate), width=width)
        self.save_hyperparameters()


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_load_from_checkpoint_in_one_process(stage: int, tmp_path: Path) -> None:
    module = Plain(width=12, rate=3e-3)
    trainer = trainer_on_ranks(stage, max_steps=2)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    want = weights(trainer, module)
    loaded = Plain.load_from_checkpoint(tmp_path / "a.ckpt")
    assert dict(loaded.hparams) == {"width": 12, "rate": 3e-3}
    assert_same_weights({n: p.detach() for n, p in loaded.named_parameters()}, want, rel=0.0)


# Orders of calls --------------------------------------------------------------------------------------------------


CALLS = ("fit", "validate", "test", "predict", "save", "resume")


def play(
    order: tuple[str, ...], trainer: L.Trainer, path: Path, *, alone: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Make the calls; what they returned, and the weights at the end."""
    module = Regressor()
    said: list[float] = []
    for call in order:
        if call in ("fit", "resume"):
            trainer.fit(module, loader(alone=alone), ckpt_path=path / "start.ckpt" if call == "resume" else None)
            said += [trainer.global_step, trainer.current_epoch]
        elif call == "save":
            trainer.save_checkpoint(path / f"saved_{'alone' if alone else 'ours'}.ckpt")
        elif call == "predict":
            outputs = trainer.predict(module, loader(alone=alone))
            mean = torch.stack([o.mean() for o in outputs]).mean()  # type: ignore[union-attr]
            said.append(float(mean if alone else trainer.strategy.reduce(mean)))
        else:
            said += getattr(trainer, call)(module, loader(alone=alone), verbose=False)[0].values()
    return said, weights(trainer, module)


@ranks(2, timeout=300)
@pytest.mark.parametrize("stage", STAGES)
def test_ordered_pairs_of_calls_equal_one_process(stage: int, tmp_path: Path) -> None:
    """Also each call twice. Nothing can be saved before a first call, by any strategy."""
    limits = {f"limit_{kind}_batches": 1 for kind in ("train", "val", "test", "predict")}
    first = trainer_on_ranks(stage, max_epochs=1, **limits)  # type: ignore[arg-type]
    first.fit(Regressor(), loader())
    first.save_checkpoint(tmp_path / "start.ckpt")
    swept = 0
    for order in itertools.product(CALLS, repeat=2):
        if order[0] == "save":
            continue
        ours = trainer_on_ranks(stage, max_epochs=2, **limits)  # type: ignore[arg-type]
        said, got = play(order, ours, tmp_path, alone=False)
        alone = trainer_alone(max_epochs=2, **limits)
        expected, want = play(order, alone, tmp_path / "", alone=True)
        assert said == pytest.approx(expected, rel=1e-9), order
        assert_same_weights(got, want)
        swept += 1
    assert swept == 30


# Batches of different sizes ---------------------------------------------------------------------------------------


class MeanOfMeans(Regressor):
    """A batch that is a list of the ranks' batches: their losses' mean, as data parallelism defines it."""

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch[0], (list, tuple)):
            return torch.stack([super(MeanOfMeans, self).loss(part) for part in batch]).mean()
        return super().loss(batch)


def sized(index: int, which: int) -> list[Tensor]:
    """Batch `index` of rank `which`: between 1 and 7 samples, in another order on each rank."""
    size = 1 + (3 * index + 5 * which) % 7
    generator = torch.Generator().manual_seed(100 * index + which)
    return [torch.randn(size, n, generator=generator, dtype=torch.float64) for n in (8, 3)]


@ranks(2, 4)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulate", (1, 2))
def test_ranks_with_batches_of_different_sizes(stage: int, accumulate: int) -> None:
    """The mean over the ranks of each rank's mean, like DDP."""
    ours, reference = MeanOfMeans(), MeanOfMeans()
    options: dict[str, Any] = {
        "max_epochs": 1,
        "accumulate_grad_batches": accumulate,
        "use_distributed_sampler": False,
    }
    trainer, alone = trainer_on_ranks(stage, **options), trainer_alone(**options)
    trainer.fit(ours, DataLoader([sized(i, rank()) for i in range(6)], batch_size=None))  # type: ignore[arg-type]
    everyone = [[sized(i, r) for r in range(world_size())] for i in range(6)]
    alone.fit(reference, DataLoader(everyone, batch_size=None))  # type: ignore[arg-type]
    assert trainer.global_step == alone.global_step == 6 // accumulate
    assert_same_weights(weights(trainer, ours), weights(alone, reference))
