"""`Trainer(strategy="tp")`: whatever holds under ZeRO holds here."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dist import ShardedStrategy, TensorParallelStrategy, ZeROStrategy
from lightning_dist.core.errors import LightningDistError, ShardedGradientError, UnsupportedOptimizerError
from lightning_dist.core.shard import cut_of
from tests.harness import rank, ranks, world_size
from tests.lit import trainer_alone, trainer_on_ranks
from tests.test_trainer_optimization import ELEMENTWISE, REFUSED
from tests.tp.lit import Lit, Texts, assert_same, fit_both, texts, whole_weights
from tests.tp.models import CASES, TOKENS, VOCAB, AllInFloat64, HandWrittenGPT


def everywhere(trainer: L.Trainer, thing: object) -> list[Any]:
    said: list[Any] = trainer.strategy.mesh.rollcall.exchange(thing)  # type: ignore[attr-defined]
    return said


def two_by_two(**options: Any) -> TensorParallelStrategy:
    return TensorParallelStrategy(tp=2, check_replicas_every=1, **options)


# Parity ---------------------------------------------------------------------------------------------------------


@ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("name", ["hand_written", "llama", "gpt2", "bert", "mixtral"])
def test_fit_equals_one_process(name: str, sequence_parallel: bool) -> None:
    strategy = TensorParallelStrategy(sequence_parallel=sequence_parallel, check_replicas_every=1)
    ours, module, theirs, alone = fit_both(lambda: Lit(name), strategy, max_epochs=2)
    assert ours.global_step == theirs.global_step == 8
    assert assert_same(ours, module, alone) > 10
    for key, value in theirs.callback_metrics.items():
        torch.testing.assert_close(ours.callback_metrics[key], value, rtol=1e-9, atol=1e-12)


@ranks(4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("name", ["hand_written", "llama_tied", "encoder"])
def test_replicas_of_cut_modules_equal_one_process(name: str, sequence_parallel: bool) -> None:
    """Data parallel times tensor parallel; metrics are means over the replicas."""
    strategy = two_by_two(sequence_parallel=sequence_parallel)
    ours, module, theirs, alone = fit_both(lambda: Lit(name), strategy, max_epochs=2)
    assert (strategy.mesh.dp.size, strategy.mesh.tp.size) == (2, 2)
    assert assert_same(ours, module, alone) > 10
    for key, value in theirs.callback_metrics.items():
        torch.testing.assert_close(ours.callback_metrics[key], value, rtol=1e-6 if key == "train" else 1e-9, atol=1e-12)


class Numbered(Dataset[dict[str, Tensor]]):
    """Texts that carry their number."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**Texts(16)[index], "number": torch.tensor(index)}


@ranks(4)
@pytest.mark.parametrize("shuffle", [False, True])
def test_lightnings_own_sampler_gives_peers_the_same_samples(shuffle: bool) -> None:
    seen: dict[int, list[int]] = {}

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            seen.setdefault(trainer.current_epoch, []).extend(batch.pop("number").tolist())

    trainer = trainer_on_ranks(two_by_two(), max_epochs=2, callbacks=[Watch()])
    trainer.fit(Lit(), DataLoader(Numbered(), batch_size=2, shuffle=shuffle))
    assert trainer.global_step == 8
    for epoch in range(2):
        said = everywhere(trainer, seen[epoch])
        assert said[0] == said[1] != said[2] == said[3]
        assert sorted(said[0] + said[2]) == list(range(16))


# Optimization ---------------------------------------------------------------------------------------------------


class Clipped(Lit):
    """Notes the norm that clipping sees."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__("hand_written", make_optimizer)
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardedStrategy):
            self.norms.append(float(strategy.grad_norm()))
        else:
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            self.norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))


@ranks(2, 4)
@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.1), ("value", 0.01)])
def test_clipping_equals_one_process(algorithm: str, value: float) -> None:
    options: dict[str, Any] = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm, "max_epochs": 1}
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.5)  # noqa: E731 (clipping must matter; Adam would scale)
    strategy = two_by_two() if world_size() == 4 else TensorParallelStrategy()
    ours, module, _, alone = fit_both(lambda: Clipped(sgd), strategy, **options)
    assert module.norms == pytest.approx(alone.norms, rel=1e-9)
    assert min(alone.norms) > value, "nothing was clipped"
    assert len(set(map(tuple, everywhere(ours, module.norms)))) == 1
    assert_same(ours, module, alone)


@ranks(2)
@pytest.mark.parametrize("replicas", [False, True], ids=["tp2", "tp1"])
def test_accumulation_equals_one_process(replicas: bool) -> None:
    strategy = TensorParallelStrategy(tp=1) if replicas else TensorParallelStrategy()
    ours, module, theirs, alone = fit_both(Lit, strategy, max_epochs=2, accumulate_grad_batches=3)
    assert ours.global_step == theirs.global_step == 4  # the last batch of an epoch steps alone
    assert_same(ours, module, alone)


OPTIMIZERS = [name for name in ELEMENTWISE if name not in ("adam", "lion")]
"""Not Lion: it takes the sign of gradients, and that of a key bias is 0 but for rounding."""


@ranks(2, 4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_elementwise_optimizers_equal_one_process(name: str) -> None:
    make = lambda: Lit("hand_written", ELEMENTWISE[name])  # noqa: E731
    ours, module, _, alone = fit_both(make, TensorParallelStrategy(check_replicas_every=1), max_epochs=1)
    assert_same(ours, module, alone)


@ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_other_optimizers_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedOptimizerError) as refusal:
        trainer_on_ranks(TensorParallelStrategy(), max_steps=1).fit(Lit("hand_written", REFUSED[name]), texts())
    kind = {"adafactor": "Adafactor", "lbfgs": "LBFGS", "muon": "Muon", "lars": "Lars", "global_norm": "ByGlobalNorm"}
    assert kind[name] in str(refusal.value)
    assert "AdamW" in str(refusal.value)
    assert "ZeRO" not in str(refusal.value)


def decay_groups(module: Any) -> torch.optim.Optimizer:
    """Matrices decay, the rest does not, by ndim and by name; the large ones have a rate of their own."""
    named = dict(module.named_parameters())
    large = [p for p in named.values() if p.shape[0] >= 37]
    decay = [p for n, p in named.items() if p.ndim >= 2 and p.shape[0] < 37]
    plain = [p for n, p in named.items() if p.dim() < 2 and "norm" not in n and p.numel() < 37]
    rest = [p for n, p in named.items() if "norm" in n]
    groups = [
        {"params": large, "lr": 3e-2},
        {"params": decay, "weight_decay": 0.5},
        {"params": plain, "weight_decay": 0.0},
        {"params": rest, "weight_decay": 0.0, "lr": 1e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


class Scheduled(Lit):
    """Groups, and a schedule by steps."""

    def __init__(self) -> None:
        super().__init__("hand_written")
        self.shapes: dict[str, tuple[int, ...]] = {}

    def configure_optimizers(self) -> Any:
        self.shapes = {n: (p.ndim, p.dim(), p.numel(), *p.shape, *p.size()) for n, p in self.named_parameters()}
        optimizer = decay_groups(self)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@ranks(2, 4)
def test_groups_by_ndim_shape_and_name_and_schedules() -> None:
    ours, module, theirs, alone = fit_both(Scheduled, max_epochs=2)
    assert module.shapes == alone.shapes
    groups = [t.optimizers[0].param_groups for t in (ours, theirs)]
    assert [[len(g["params"]), g["lr"], g["weight_decay"]] for g in groups[0]] == [
        [len(g["params"]), g["lr"], g["weight_decay"]] for g in groups[1]
    ]
    assert all(g["params"] for g in groups[0])
    assert_same(ours, module, alone)


class TwoOptimizers(Lit):
    """Manual optimization: attention and the rest take turns, as generator and critic do."""

    def __init__(self) -> None:
        super().__init__("hand_written")
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()

    def configure_optimizers(self) -> Any:
        attention = [p for n, p in self.named_parameters() if "attention" in n]
        rest = [p for n, p in self.named_parameters() if "attention" not in n]
        optimizers = [torch.optim.Adam(attention, 1e-2), torch.optim.SGD(rest, 0.1, momentum=0.9)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]


@ranks(2, 4)
def test_two_optimizers_by_hand() -> None:
    ours, module, theirs, alone = fit_both(TwoOptimizers, TensorParallelStrategy(check_replicas_every=1), max_epochs=1)
    assert ours.global_step == theirs.global_step == 8
    assert_same(ours, module, alone)


# Norms ----------------------------------------------------------------------------------------------------------


class Norms(Lit):
    """Norms of all kinds before a step, by Lightning's function where there is one process."""

    def __init__(self) -> None:
        super().__init__("hand_written")  # whose words are tied to its head
        self.found: dict[str, float] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        for kind in (1.0, 2.0, math.inf):
            if isinstance(strategy, ShardedStrategy):
                self.found |= strategy.grad_norms(kind)
                self.found[f"{kind}"] = float(strategy.grad_norm(kind))
                with strategy.gathered(gradients=True):
                    for key, value in grad_norm(self, kind).items():
                        assert float(value) == pytest.approx(self.found[key], rel=1e-9)
            else:
                self.found |= {k: float(v) for k, v in grad_norm(self, kind).items()}
                everything = torch.cat([p.grad.reshape(-1) for p in self.parameters() if p.grad is not None])
                self.found[f"{kind}"] = float(torch.linalg.vector_norm(everything, kind))


@ranks(2, 4)
@pytest.mark.parametrize("tp", [2, 4])
def test_norms_equal_one_process_and_are_the_same_everywhere(tp: int) -> None:
    if tp > world_size():
        tp = 1
    ours, module, _, alone = fit_both(Norms, TensorParallelStrategy(tp=tp), max_steps=2)
    assert module.found.keys() == alone.found.keys()
    assert len(alone.found) == 3 * (len(list(alone.parameters())) + 2)
    assert module.found == pytest.approx(alone.found, rel=1e-9)
    assert all(said == module.found for said in everywhere(ours, module.found))


# Evaluation and orders of calls ---------------------------------------------------------------------------------


@ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_evaluation_equals_one_process_on_every_rank(sequence_parallel: bool) -> None:
    ours = trainer_on_ranks(TensorParallelStrategy(sequence_parallel=sequence_parallel))
    theirs = trainer_alone()
    module, alone = Lit("llama"), Lit("llama")
    for call in ("validate", "test"):
        got, want = (getattr(t, call)(m, texts(8), verbose=False) for t, m in ((ours, module), (theirs, alone)))
        assert got == [pytest.approx(want[0], rel=1e-9)]
    predicted = ours.predict(module, texts(8))
    expected = theirs.predict(alone, texts(8))
    assert predicted is not None
    assert len(predicted) == 2
    for mine, reference in zip(predicted, expected, strict=True):  # type: ignore[arg-type]
        assert type(mine) is Tensor
        torch.testing.assert_close(mine, reference, rtol=0, atol=0)


class Logits(Lit):
    """Returns what the model gives it: tensors of which each rank has a part."""

    def predict_step(self, batch: Any, index: int) -> Any:
        with AllInFloat64():
            out = self.model(batch["input_ids"])
        return {"logits": out, "first": out[..., :3], "shapes": [out.shape]}


@ranks(2)
def test_predictions_are_whole_tensors() -> None:
    """A user puts them together and saves them long after, or on one rank only."""
    ours, theirs = trainer_on_ranks(TensorParallelStrategy()), trainer_alone()
    got = ours.predict(Logits("hand_written"), texts(8))
    want = theirs.predict(Logits("hand_written"), texts(8))
    for mine, reference in zip(got, want, strict=True):  # type: ignore[arg-type]
        assert type(mine["logits"]) is Tensor  # type: ignore[call-overload, index]
        assert mine["shapes"] == reference["shapes"]  # type: ignore[call-overload, index]
        for key in ("logits", "first"):
            torch.testing.assert_close(mine[key], reference[key], rtol=1e-9, atol=1e-12)  # type: ignore[call-overload, index]


class Stops(Lit):
    """A validation metric that gets worse from the third epoch on."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch).detach() * 0 + abs(self.trainer.current_epoch - 2.0), sync_dist=True)


@ranks(4)
def test_early_stopping_stops_all_ranks_together() -> None:
    options: dict[str, Any] = {"max_epochs": 9}
    stop = EarlyStopping("val", patience=2)
    ours = trainer_on_ranks(two_by_two(), callbacks=[stop], **options)
    module = Stops()
    ours.fit(module, texts(8, replicas=2, replica=rank() // 2), texts(8, replicas=2, replica=rank() // 2))
    assert ours.current_epoch == 5
    assert stop.stopped_epoch == 4


class ByReplica(Lit):
    """Logs numbers that differ between replicas, and gathers and counts."""

    def __init__(self) -> None:
        super().__init__("hand_written")
        import torchmetrics

        self.count = torchmetrics.SumMetric()
        self.words = torchmetrics.CatMetric()

    def training_step(self, batch: Any, index: int) -> Tensor:
        replica = float(rank() // 2 if world_size() == 4 else 0)
        self.log("mean", replica, sync_dist=True, on_epoch=True)
        self.log("sum", replica + 1, sync_dist=True, reduce_fx="sum", on_epoch=True, on_step=False)
        self.count.update(len(batch["input_ids"]))
        self.log("count", self.count, on_epoch=True, on_step=False)
        self.words.update(torch.tensor([replica]))
        self.gathered = self.all_gather(torch.tensor([replica]))
        return super().training_step(batch, index)

    def on_train_epoch_end(self) -> None:
        self.seen = self.words.compute()
        self.words.reset()


@ranks(4)
def test_replicas_count_once_in_metrics() -> None:
    """Peers of a replica see the same samples: sums, gathered tensors and metric states hold each of them once."""
    ours = trainer_on_ranks(two_by_two(), max_epochs=1)
    module = ByReplica()
    ours.fit(module, texts(16, replicas=2, replica=rank() // 2))
    metrics = ours.callback_metrics
    assert float(metrics["mean"]) == 0.5
    assert float(metrics["sum"]) == 4 * (1 + 2)
    assert float(metrics["count"]) == 16
    assert sorted(module.seen.tolist()) == [0.0] * 4 + [1.0] * 4
    assert module.gathered.flatten().tolist() == [0.0, 1.0]
    assert module.gathered.shape == (2, 1)


@ranks(2)
def test_metrics_of_one_replica_are_those_of_one_process() -> None:
    ours, module = trainer_on_ranks(TensorParallelStrategy(), max_epochs=1), ByReplica()
    ours.fit(module, texts())
    assert float(ours.callback_metrics["count"]) == 16
    assert module.seen.tolist() == [0.0] * 4
    assert module.gathered.tolist() == [[0.0]]
    zero = trainer_on_ranks(2, max_epochs=1)
    zero.fit(module, texts(replicas=2, replica=rank()))  # where every rank counts again
    assert float(zero.callback_metrics["count"]) == 16
    assert module.seen.tolist() == [0.0] * 8


@ranks(2, 4)
def test_fit_again_and_test_after_fit() -> None:
    strategy = two_by_two() if world_size() == 4 else TensorParallelStrategy()
    ours, module, theirs, alone = fit_both(Lit, strategy, max_epochs=1)
    share = {"replicas": strategy.mesh.dp.size, "replica": strategy.mesh.dp.rank}
    results = []
    for trainer, m, shared in ((ours, module, share), (theirs, alone, {})):
        trainer.fit_loop.max_epochs = 2
        trainer.fit(m, texts(**shared))  # type: ignore[arg-type]
        results.append(trainer.test(m, texts(8, **shared), verbose=False))  # type: ignore[arg-type]
    assert ours.global_step == 8
    assert_same(ours, module, alone)
    assert results[0] == [pytest.approx(results[1][0], rel=1e-9)]


@ranks(2, 4)
@pytest.mark.parametrize("name", ["hand_written", "mixtral"])
@pytest.mark.parametrize("then", ["zero0", "zero2", "zero3", "tp2", "sequence"])
def test_a_module_goes_on_under_another_strategy(name: str, then: str) -> None:
    """It is made whole for the next Trainer, whatever that does with it."""
    strategy = TensorParallelStrategy(sequence_parallel=then == "zero2")
    ours, module, _, alone = fit_both(lambda: Lit(name), strategy, max_epochs=1)
    kinds: dict[str, Callable[[], ShardedStrategy]] = {
        "tp2": lambda: TensorParallelStrategy(tp=2),
        "sequence": lambda: TensorParallelStrategy(sequence_parallel=True),
    }
    after = kinds[then]() if then in kinds else ZeROStrategy(int(then[-1]))
    replicas = {"tp2": world_size() // 2, "sequence": 1}.get(then, world_size())
    if name == "mixtral":  # its loss is no mean over samples: every replica gets the whole batch
        replicas = 1
    again = trainer_on_ranks(after, max_epochs=1)
    again.fit(module, texts(replicas=replicas, replica=rank() // (world_size() // replicas)))
    trainer_alone(max_epochs=1).fit(alone, texts())
    assert_same(again, module, alone)
    if then.startswith("zero"):
        assert all(cut_of(p) is None and type(p).__name__ != "CutParameter" for p in module.parameters())


@ranks(2)
@pytest.mark.parametrize("name", ["hand_written", "mixtral", "llama"])
def test_a_copy_taken_inside_gathered_is_a_plain_module(name: str) -> None:
    """Which is how a module goes on without a strategy of ours; a state dict does it as well."""
    ours, module, _, alone = fit_both(lambda: Lit(name), TensorParallelStrategy(sequence_parallel=True), max_epochs=1)
    strategy = ours.strategy
    assert isinstance(strategy, TensorParallelStrategy)
    with strategy.gathered(module):
        plain = copy.deepcopy(module)
    state = strategy.full_state_dict()
    assert all(type(p) is nn.Parameter for p in plain.parameters())
    loaded = Lit(name)
    if rank() == 0:
        loaded.load_state_dict(state)
    for trainer_module in (plain, alone, *([loaded] if rank() == 0 else [])):
        trainer_alone(max_epochs=1).fit(trainer_module, texts())
    for one in (plain, *([loaded] if rank() == 0 else [])):
        for (key, got), want in zip(one.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=key)
    ours.validate(module, texts(8), verbose=False)  # and the cut one still works


@ranks(2)
def test_a_cut_module_under_no_strategy_is_refused() -> None:
    """`strategy="auto"` would train parts of matrices in one process."""
    trainer = trainer_on_ranks(TensorParallelStrategy(), max_epochs=1)
    module = Lit()
    trainer.fit(module, texts())
    with pytest.raises(LightningDistError, match=r"gathered|full_state_dict"):
        trainer_alone(max_epochs=1).fit(module, texts())


# What user code does with parameters ----------------------------------------------------------------------------


class Penalized(Lit):
    """Weight penalties of several kinds, as people write them."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        l2 = sum(p.pow(2).sum() for p in self.parameters())
        l1 = sum(p.abs().sum() for n, p in self.named_parameters() if p.ndim > 1)
        norms = sum(p.norm() for p in self.parameters() if p.dim() > 1)
        rows = sum(p.norm(2, dim=-1).mean() for p in self.parameters() if p.dim() > 1)
        first = self.model.blocks[0].up.weight  # type: ignore[union-attr, index]
        products = (first @ first.t()).square().sum() + torch.cat(
            [p.view(-1) for p in self.parameters()]
        ).square().sum()
        return super().training_step(batch, index) + 1e-3 * (l2 + l1 + norms + rows + products)  # type: ignore[no-any-return]


@ranks(2, 4)
def test_weight_penalties_equal_one_process() -> None:
    strategy = two_by_two() if world_size() == 4 else TensorParallelStrategy(check_replicas_every=1)
    ours, module, _, alone = fit_both(Penalized, strategy, max_epochs=1)
    assert_same(ours, module, alone)


class Constrains(L.Callback):
    """Writes into parameters between steps, as weight constraints do, without knowing of any strategy."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        first, second = module.model.blocks
        for p in first.parameters():
            p.clamp_(-0.2, 0.2)
        second.up.weight.div_(second.up.weight.norm(dim=1, keepdim=True).clamp(min=1.0))
        second.down.weight.data.mul_(0.9)
        second.attention.qkv.weight.data = second.attention.qkv.weight.data.clamp(-0.3, 0.3)
        second.attention.qkv.bias.data = second.attention.qkv.bias.detach() * 0.5
        module.model.words.weight.data[3].zero_()
        module.model.words.weight[5, 2:4] = 0.25
        assert module.model.head.weight is module.model.words.weight


@ranks(2, 4)
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_constraints_written_in_callbacks_count(precision: str) -> None:
    strategy = two_by_two() if world_size() == 4 else TensorParallelStrategy(check_replicas_every=1)
    if precision == "64-true":
        ours, module, _, alone = fit_both(Lit, strategy, max_epochs=1, callbacks=[Constrains()])
        assert_same(ours, module, alone)
        return
    ours = trainer_on_ranks(strategy, max_epochs=1, callbacks=[Constrains()], precision=precision)
    module = Lit().float()
    ours.fit(module, texts(replicas=world_size() // 2, replica=rank() // 2))
    values = whole_weights(ours, module)
    assert not values["model.words.weight"][3].any()
    assert float(values["model.blocks.0.up.weight"].abs().max()) <= 0.201


@ranks(2)
def test_gradients_of_cut_parameters_are_not_shown_in_part() -> None:
    seen: dict[str, Any] = {}

    class Reads(Lit):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            weight = self.model.blocks[0].up.weight  # type: ignore[union-attr, index]
            assert weight.grad is not None
            seen["shapes"] = (tuple(weight.grad.shape), tuple(weight.shape), weight.grad.numel(), weight.grad.dim())
            weight.grad.norm()

    with pytest.raises(ShardedGradientError, match="grad_norms"):
        trainer_on_ranks(TensorParallelStrategy(), max_steps=1).fit(Reads(), texts())
    assert seen["shapes"] == ((64, 16), (64, 16), 64 * 16, 2)


class EditsGradients(Lit):
    """Gradients read and written whole: scaled by their norm, one dropped, rows zeroed."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardedStrategy):
            with strategy.gathered(self, gradients=True):
                self.edit()
        else:
            self.edit()

    def edit(self) -> None:
        for name, p in self.named_parameters():
            assert p.grad is not None
            assert p.grad.shape == p.shape
            if name.endswith("1.down.weight"):
                p.grad = None
            elif name.endswith("0.down.weight"):
                p.grad = torch.ones_like(p) * p.grad.norm()
            else:
                p.grad.div_(p.grad.norm() + 1e-3)
                p.grad[0].zero_()


@ranks(2, 4)
def test_gradients_edited_inside_gathered() -> None:
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1)  # noqa: E731
    strategy = two_by_two() if world_size() == 4 else TensorParallelStrategy(check_replicas_every=1)
    ours, module, _, alone = fit_both(lambda: EditsGradients("hand_written", sgd), strategy, max_epochs=1)
    assert_same(ours, module, alone)


class EditsWeights(L.Callback):
    """Values read and written whole, outside steps; rank 0's count."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if isinstance(trainer.strategy, ShardedStrategy):
            with trainer.strategy.gathered(module), torch.no_grad():
                self.edit(module)
        else:
            with torch.no_grad():
                self.edit(module)

    def edit(self, module: Any) -> None:
        assert all(type(p) is nn.Parameter for p in module.parameters())
        for p in module.parameters():
            p.copy_(p / (1 + p.norm()) if p.ndim > 1 else p.clamp(-0.1, 0.1))
        module.model.norm.weight.data = torch.full((16,), 1.5).double()
        module.model.blocks[0].up.weight[2] = 0.5


@ranks(2, 4)
def test_weights_edited_inside_gathered() -> None:
    strategy = two_by_two() if world_size() == 4 else TensorParallelStrategy(check_replicas_every=1)
    ours, module, _, alone = fit_both(Lit, strategy, max_epochs=1, callbacks=[EditsWeights()])
    assert_same(ours, module, alone)


@ranks(2, 4)
def test_inside_gathered_rank_zero_writes_for_all() -> None:
    """What one rank alone writes must not part the copies that peers hold in common."""
    strategy = two_by_two() if world_size() == 4 else TensorParallelStrategy()
    trainer, module = trainer_on_ranks(strategy, max_steps=1), Lit()
    trainer.fit(module, texts())
    with strategy.gathered(module), torch.no_grad():
        for p in module.parameters():
            p.fill_(float(rank() + 1))
    strategy.check_replicas()
    for name, value in whole_weights(trainer, module).items():
        assert bool((value == 1.0).all()), name


@ranks(2)
def test_gathered_inside_a_training_step() -> None:
    class Reads(Lit):
        def training_step(self, batch: Any, index: int) -> Tensor:
            strategy, extra = self.trainer.strategy, torch.zeros(())
            weight = self.model.blocks[0].up.weight  # type: ignore[union-attr, index]
            if isinstance(strategy, ShardedStrategy):
                with strategy.gathered(self):
                    extra = (weight.tril() ** 2).sum() + weight[3].abs().sum() + torch.linalg.matrix_norm(weight)
            else:
                extra = (weight.tril() ** 2).sum() + weight[3].abs().sum() + torch.linalg.matrix_norm(weight)
            return super().training_step(batch, index) + 0.1 * extra

    ours, module, _, alone = fit_both(Reads, max_epochs=1)
    assert_same(ours, module, alone)


@ranks(2)
def test_whole_values_can_be_saved_by_hand() -> None:
    """`module.state_dict()` of a cut module, saved on all ranks, holds whole tensors."""
    import io

    ours, module, _, alone = fit_both(Lit, max_epochs=1)
    state = module.state_dict()
    assert {k: tuple(v.shape) for k, v in state.items()} == {k: tuple(v.shape) for k, v in alone.state_dict().items()}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    for key, want in alone.state_dict().items():
        torch.testing.assert_close(read[key], want, rtol=1e-9, atol=1e-9)


@ranks(2)
@pytest.mark.parametrize("name", ["hand_written", "mixtral", "gpt2"])
def test_a_forward_inside_gathered_is_that_of_the_whole_module(name: str) -> None:
    trainer, module = trainer_on_ranks(TensorParallelStrategy(sequence_parallel=True)), Lit(name)
    trainer.validate(module, texts(8), verbose=False)
    batch = CASES[name].batch()
    with torch.no_grad():
        want = Lit(name).loss(batch)
        with trainer.strategy.gathered(module):  # type: ignore[attr-defined]
            inside = module.loss(batch)
        outside = module.loss(batch)
    torch.testing.assert_close(inside, want, rtol=1e-10, atol=0)
    torch.testing.assert_close(outside, want, rtol=1e-10, atol=0)


# Precision ------------------------------------------------------------------------------------------------------


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
PRECISIONS = {
    "32-true": (FP32, FP32, 1e-5),
    "bf16-mixed": (FP32, BF16, 0.02),
    "16-mixed": (FP32, FP16, 0.005),
    "bf16-true": (BF16, BF16, 0.05),
    "bf16-true+master": (FP32, BF16, 0.02),
}
"""flag -> (masters and moments, values that compute, how far losses may be from those of float32)"""


class Single(L.LightningModule):
    """In float32, and not cast to float64 inside."""

    def __init__(self, name: str) -> None:
        super().__init__()
        case = CASES[name]
        self.case, self.model = case, case.build().float()
        self.tp_plan = None if case.plan is None else {f"model.{k}": v for k, v in case.plan.items()}
        self.losses: list[float] = []
        self.compute: set[torch.dtype] = set()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.case.loss(self.model, batch)
        self.compute = {p.dtype for p in self.parameters()}
        self.losses.append(float(loss.detach()))
        return loss.float()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def options_of(flag: str) -> dict[str, Any]:
    if flag == "16-mixed":  # Lightning turns the flag into bf16-mixed on the CPU
        from lightning.pytorch.plugins import MixedPrecision

        return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))]}
    return {"precision": flag.removesuffix("+master")}


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("name", ["hand_written", "llama", "gpt2", "encoder"])
@pytest.mark.parametrize("flag", PRECISIONS)
def test_precision(flag: str, name: str, sequence_parallel: bool) -> None:
    master, compute, far = PRECISIONS[flag]
    exact = Single(name)
    trainer_alone(max_steps=4).fit(exact, texts())
    module = Single(name)
    strategy = TensorParallelStrategy(
        sequence_parallel=sequence_parallel, master_weights=flag.endswith("+master"), check_replicas_every=1
    )
    trainer = trainer_on_ranks(strategy, max_steps=4, **options_of(flag))
    trainer.fit(module, texts())
    engine = strategy.engine
    assert module.compute == {compute}
    assert {g.owned.dtype for g in engine.groups} == {master}
    state = trainer.optimizers[0].state
    assert {v.dtype for s in state.values() for v in s.values() if v.ndim} == {master}
    assert {v.dtype for v in strategy.full_state_dict().values() if v.is_floating_point()} == {master}
    assert {v.dtype for v in whole_weights(trainer, module).values()} == {master}
    assert module.losses == pytest.approx(exact.losses, rel=far)
    assert len(set(exact.losses)) == 4


# Adapters, odd numbers of heads ---------------------------------------------------------------------------------


class Adapted(Lit):
    """LoRA on a Llama, as peft draws it: B is zero."""

    def __init__(self) -> None:
        super().__init__("llama")
        import peft

        config = peft.LoraConfig(
            r=2,
            lora_alpha=8,
            lora_dropout=0.0,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
            modules_to_save=["norm"],
        )
        torch.manual_seed(12)
        self.model = peft.get_peft_model(self.model, config).double()  # type: ignore[arg-type, assignment]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@ranks(2, 4)
def test_adapters_equal_one_process() -> None:
    initial: dict[str, Any] = {}

    class Note(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if isinstance(trainer.strategy, ShardedStrategy):
                initial.update(whole_weights(trainer, module))

    reference = Adapted()
    start = {n: p.detach().clone() for n, p in reference.named_parameters()}
    strategy = TensorParallelStrategy(check_replicas_every=1)
    ours, module, _, alone = fit_both(Adapted, strategy, samples=20, max_epochs=4, callbacks=[Note()])
    assert ours.global_step == 20
    assert all(torch.equal(value, start[name]) for name, value in initial.items())
    trained = [n for n, p in module.named_parameters() if p.requires_grad]
    assert sum("lora_A" in n for n in trained) == sum("lora_B" in n for n in trained) == 12
    assert any("modules_to_save" in n for n in trained)
    common = [n for n, p in module.named_parameters() if p.requires_grad and cut_of(p) is None]
    assert sum("lora_" in n for n in common) >= 12
    strategy.check_replicas()
    assert_same(ours, module, alone)
    final = whole_weights(ours, module)
    assert all(torch.equal(final[n], start[n]) == (n not in trained) for n in final)


class Small(Lit):
    """The shape of SmolLM2: 9 heads, 3 key-value heads, tied words, sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__("llama")
        import transformers

        config = transformers.LlamaConfig(
            hidden_size=36,
            intermediate_size=50,
            num_hidden_layers=2,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=4,
            vocab_size=50,
            max_position_embeddings=32,
            tie_word_embeddings=True,
        )
        torch.manual_seed(2)
        self.model = transformers.LlamaForCausalLM(config).double()


@ranks(3)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_nine_heads_on_three_ranks(sequence_parallel: bool) -> None:
    strategy = TensorParallelStrategy(sequence_parallel=sequence_parallel, check_replicas_every=1)
    ours, module, _, alone = fit_both(Small, strategy, max_epochs=2)
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight  # type: ignore[union-attr]
    assert_same(ours, module, alone)


# Initial weights ------------------------------------------------------------------------------------------------


@ranks(2, 4)
def test_unseeded_modules_take_the_values_of_rank_zero() -> None:
    module = Lit()
    torch.manual_seed(100 + rank())
    module.model = HandWrittenGPT().double()
    module.tp_plan = {f"model.{k}": v for k, v in HandWrittenGPT.PLAN.items()}
    own = {n: p.detach().clone() for n, p in module.named_parameters()}
    strategy = two_by_two() if world_size() == 4 else TensorParallelStrategy()
    trainer = trainer_on_ranks(strategy)
    trainer.validate(module, texts(8), verbose=False)
    first = everywhere(trainer, own)[0]
    for name, value in whole_weights(trainer, module).items():
        assert torch.equal(value, first[name]), name
    assert rank() == 0 or not torch.equal(own["model.words.weight"], first["model.words.weight"])


@ranks(2, 4)
@pytest.mark.parametrize("name", ["hand_written", "llama", "phi3"])
def test_initial_parts_are_slices_of_what_one_process_has(name: str) -> None:
    module, alone = Lit(name), dict(Lit(name).named_parameters())
    strategy = TensorParallelStrategy()
    trainer = trainer_on_ranks(strategy)
    trainer.validate(module, texts(8), verbose=False)
    cut = 0
    for slot in strategy.engine.slots.values():
        want = slot.part_of(alone[slot.name].detach())
        assert torch.equal(slot.fragment.detach().view(want.shape), want), slot.name
        cut += slot.cut is not None
    assert cut >= 8


def test_sizes_of_these_tests() -> None:
    assert (VOCAB, TOKENS) == (37, 8)
    assert len(PRECISIONS) == 5
    assert len(OPTIMIZERS) == 7
