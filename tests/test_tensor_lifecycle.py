"""Long runs under tensor parallelism: averages, freezing, bad losses, uneven data, meta modules, batch statistics."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist import ShardedStrategy, TensorParallelStrategy
from lightning_dist.core.errors import NonFiniteLossError, PeerLostError
from tests.harness import rank, ranks, world_size
from tests.lit import told, trainer_alone, trainer_on_ranks
from tests.test_averaging import CALLBACKS
from tests.tp.lit import Lit, Texts, assert_same, fit_both, texts, whole_weights
from tests.tp.models import HandWrittenGPT

pytestmark = pytest.mark.filterwarnings("ignore:.*keeps a whole average")


def scheduled(module: Any) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch)]


@ranks(2, 4)
@pytest.mark.parametrize("kind", CALLBACKS)
def test_averages_equal_one_process(kind: str) -> None:
    strategy = TensorParallelStrategy(tp=2, check_replicas_every=1)
    make = lambda: Lit("hand_written", scheduled)  # noqa: E731
    ours, module, theirs, alone = fit_both(make, strategy, max_epochs=4, callbacks=[CALLBACKS[kind]()])
    assert_same(ours, module, alone)
    assert float(ours.callback_metrics["val"]) == pytest.approx(float(theirs.callback_metrics["val"]), rel=1e-8)


class Unfreeze(BaseFinetuning):
    """Trains norm and head alone for an epoch, then everything."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.blocks, optimizer, lr=5e-3)


@ranks(2, 4)
def test_unfreezing_between_epochs() -> None:
    only = lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)  # noqa: E731
    strategy = TensorParallelStrategy(check_replicas_every=1)
    make = lambda: Lit("hand_written", only)  # noqa: E731
    ours, module, _, alone = fit_both(make, strategy, max_epochs=3, callbacks=[Unfreeze()])
    assert len(ours.optimizers[0].param_groups) == 2
    assert_same(ours, module, alone)


class Poisoned(Lit):
    """The loss is NaN at batch 2 of the second replica."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss * float("nan") if index == 2 and (self.everywhere or rank() >= 2) else loss

    everywhere = False


@ranks(4)
def test_nan_in_one_replica_stops_or_skips_on_all() -> None:
    share = {"replicas": 2, "replica": rank() // 2}
    strategy = TensorParallelStrategy(tp=2, on_nonfinite="skip", check_replicas_every=1)
    trainer, module = trainer_on_ranks(strategy, max_epochs=1), Poisoned()
    trainer.fit(module, texts(**share))
    values = whole_weights(trainer, module)
    assert all(bool(torch.isfinite(v).all()) for v in values.values())
    assert strategy.mesh.rollcall.exchange(trainer.global_step) == [4] * 4
    trainer = trainer_on_ranks(TensorParallelStrategy(tp=2), max_epochs=1)
    module = Poisoned()
    module.everywhere = True  # else the others would wait until the process of the failed ranks ends
    with pytest.raises((NonFiniteLossError, PeerLostError), match=r"rank \d at batch 2"):
        trainer.fit(module, texts(**share))


class Stream(IterableDataset[dict[str, Tensor]]):
    """The second replica has one sample less; peers have the same."""

    def __iter__(self) -> Any:
        replica = rank() // 2
        yield from (Texts(16)[8 * replica + i] for i in range(8 - 2 * replica))


@ranks(4)
def test_replicas_with_unequal_data_stop_together() -> None:
    strategy = TensorParallelStrategy(tp=2, check_replicas_every=1)
    trainer = trainer_on_ranks(strategy, max_epochs=2)
    trainer.fit(Lit(), DataLoader(Stream(), batch_size=2))
    assert strategy.mesh.rollcall.exchange(trainer.global_step) == [6] * 4


class Unbuilt(Lit):
    """Built on the meta device by `configure_model`-like code in the constructor."""

    def __init__(self, *, meta: bool) -> None:
        super().__init__("llama")
        import transformers

        config = copy.deepcopy(self.model.config)  # type: ignore[union-attr]
        torch.manual_seed(21)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta" if meta else "cpu"):
                self.model = transformers.LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)


@ranks(2, 4)
def test_meta_modules_get_the_values_of_one_process() -> None:
    alone = dict(Unbuilt(meta=False).named_parameters())
    module = Unbuilt(meta=True)
    assert all(p.is_meta for p in module.parameters())
    trainer = trainer_on_ranks(TensorParallelStrategy(sequence_parallel=True))
    torch.manual_seed(21)
    trainer.validate(module, texts(8), verbose=False)
    for name, value in whole_weights(trainer, module).items():
        assert torch.equal(value, alone[name]), name


class Statistics(HandWrittenGPT):
    """Batch norm between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(16)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = self.statistics(block(x).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(self.norm(x))
        return logits


class LitStatistics(Lit):
    """With a module that keeps buffers."""

    def __init__(self) -> None:
        super().__init__("hand_written")
        torch.manual_seed(4)
        self.model = Statistics().double()


@ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_batch_statistics_equal_one_process(sequence_parallel: bool) -> None:
    strategy = TensorParallelStrategy(sequence_parallel=sequence_parallel, check_replicas_every=1)
    ours, module, _, alone = fit_both(LitStatistics, strategy, max_epochs=1)
    assert_same(ours, module, alone)
    for (name, got), want in zip(module.named_buffers(), alone.buffers(), strict=True):
        assert type(got) is Tensor, name
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8, msg=name)  # Adam lifts a bias's rounding


@ranks(4)
def test_a_name_in_the_trainer_is_the_strategy() -> None:
    """`strategy="tp2"` and `"tp"`, as most people write it."""
    for name, layout in (("tp2", (2, 2)), ("tp", (1, 4))):
        module = Lit()
        trainer = trainer_on_ranks(name, max_steps=1)  # type: ignore[arg-type]
        strategy = trainer.strategy
        assert isinstance(strategy, TensorParallelStrategy)
        share = {"replicas": layout[0], "replica": rank() // layout[1]}
        trainer.fit(module, texts(**share))
        assert (strategy.mesh.dp.size, strategy.mesh.tp.size) == layout


@ranks(2)
def test_other_trainers_in_between_leave_no_trace() -> None:
    """The reference of these tests runs in the same process: it must not be touched by the strategy."""
    before = [torch.nn.Linear.forward, torch.Tensor.__torch_function__, torch.nn.functional.linear]
    ours = trainer_on_ranks(TensorParallelStrategy(), max_steps=1)
    ours.fit(Lit(), texts())
    assert before == [torch.nn.Linear.forward, torch.Tensor.__torch_function__, torch.nn.functional.linear]
    plain = Lit()
    trainer_alone(max_steps=1).fit(plain, texts())
    assert all(type(p) is nn.Parameter for p in plain.parameters())
    assert world_size() == 2
    assert isinstance(ours.strategy, ShardedStrategy)


@ranks(4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_the_line_at_setup_counts_what_a_rank_holds_and_sends(sequence_parallel: bool) -> None:
    strategy = TensorParallelStrategy(tp=2, sequence_parallel=sequence_parallel)
    trainer = trainer_on_ranks(strategy, max_steps=1)
    with told() as lines:
        trainer.fit(Lit(), texts(replicas=2, replica=rank() // 2))
    everything = parts = 0
    for slot in strategy.engine.slots.values():
        own, split = slot.parameter.numel(), None if slot.cut is None else slot.cut.split
        if split is not None:
            own = own * split.sizes[strategy.mesh.tp.rank] // split.size
            parts += own
        everything += own
    assert 0 < parts < everything
    sent = strategy.mesh.ledger.total(axis="dp", purpose="gradients")
    assert 1000 < sent < 1_000_000
    want = (
        f"tp2{' with sequence parallelism' if sequence_parallel else ''}, 2 replicas: per rank {everything:,} "
        f"parameters, of which {parts:,} are its parts of cut matrices; gradients of the replicas: {sent / 1e3:.1f} kB "
        "per step"
    )
    assert (want in lines) == (rank() == 0)


@ranks(2)
@pytest.mark.parametrize("tp", [1, 2])
def test_an_average_that_is_whole_on_every_rank_is_told(tp: int) -> None:
    """Where ranks hold parts of the model."""
    trainer = trainer_on_ranks(TensorParallelStrategy(tp=tp), max_steps=1, callbacks=[CALLBACKS["ema"]()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Lit(), texts(replicas=2 // tp, replica=rank() % (2 // tp)))
    found = ["keeps a whole average" in str(warning.message) for warning in caught]
    assert any(found) == (tp == 2 and rank() == 0)
