"""What a step leaves behind under `Trainer(strategy="pp")`: metrics, logged values, attributes, buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

from lightning_dist import PipelineParallelStrategy
from tests.harness import rank, ranks
from tests.lit import trainer_alone, trainer_on_ranks
from tests.pp.lit import Small, everywhere, in_order, points
from tests.tp.lit import assert_same

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"num_microbatches": 4},
    "interleaved": {"schedule": "interleaved", "virtual_stages": 2, "num_microbatches": 4},
    "zbv": {"schedule": "zbv", "num_microbatches": 4},
}


def both(
    make: Callable[[], L.LightningModule], data: DataLoader[Any] | None = None, call: str = "fit", **options: Any
) -> tuple[L.Trainer, Any, L.Trainer, Any]:
    """On the ranks and alone, on the same data."""
    given = {
        key: options.pop(key) for key in list(options) if key in ("schedule", "virtual_stages", "num_microbatches")
    }
    data = points() if data is None else data
    module, alone = make(), make()
    ours = trainer_on_ranks(PipelineParallelStrategy(**{"num_microbatches": 4} | given), max_epochs=2, **options)
    theirs = trainer_alone(max_epochs=2, **options)
    for metric in (part for part in alone.modules() if isinstance(part, Metric)):
        metric.distributed_available_fn = lambda: False  # the ranks of the pool are there
    getattr(ours, call)(module, data)
    getattr(theirs, call)(alone, data)
    return ours, module, theirs, alone


def assert_equal_metrics(ours: L.Trainer, theirs: L.Trainer, rel: float = 1e-6) -> None:
    said = everywhere(ours, {key: float(value) for key, value in ours.callback_metrics.items()})
    want = {key: float(value) for key, value in theirs.callback_metrics.items()}
    for metrics in said:
        assert metrics == pytest.approx(want, rel=rel)


class Metrics(Small):
    """Metrics as people write them: called in the step, updated, in a collection whose members share states."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        kinds = [MulticlassPrecision(3), MulticlassRecall(3), MulticlassAccuracy(3)]
        self.several = MetricCollection(kinds, prefix="several/")
        self.samples = SumMetric()

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.samples.update(len(batch[0]))  # ahead of the layers: every stage comes by
        out = self(batch[0])
        classes, wanted = out.detach().argmax(1), batch[1].argmax(1)
        self.accuracy(classes, wanted)
        self.several.update(classes, wanted)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("samples", self.samples, on_step=False, on_epoch=True)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        return nn.functional.mse_loss(out, batch[1])


@ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_metrics_of_torchmetrics(schedule: str) -> None:
    ours, _, theirs, alone = both(Metrics, **SCHEDULES[schedule])
    assert len(alone.several.compute_groups) < 3, "no states are shared"
    assert {"accuracy_step", "accuracy_epoch", "samples", "several/MulticlassRecall"} <= set(theirs.callback_metrics)
    assert_equal_metrics(ours, theirs)


class Logs(Small):
    """Everything that `self.log` takes."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.log("index", float(index), on_step=True, on_epoch=True)
        self.log("early_sum", 1.0 * len(batch[0]), reduce_fx="sum", on_step=False, on_epoch=True)
        loss = self.loss(batch)
        self.log("step_and_epoch", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("weighed", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        samples = self.last
        self.log("largest", samples.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("smallest", samples.min(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        self.log("sum", samples.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss


@ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logging(schedule: str) -> None:
    ours, _, theirs, _ = both(Logs, **SCHEDULES[schedule])
    assert {"index_epoch", "step_and_epoch_step", "early_sum", "smallest"} <= set(theirs.callback_metrics)
    assert_equal_metrics(ours, theirs)


class Keeps(Small):
    """What users keep in attributes and buffers, ahead of the layers and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))
        self.total = torch.zeros(3, dtype=torch.float64)
        self.ahead: list[int] = []
        self.outputs: list[dict[str, Any]] = []
        self.arrays: list[Any] = []
        self.by_class: dict[str, list[float]] = {"sum": []}
        self.ends: list[Any] = []

    def training_step(self, batch: Any, index: int) -> dict[str, Any]:
        self.ahead.extend([index] * len(batch[0]))
        out = self(batch[0])
        sums = out.detach().sum(1)
        self.total += out.detach().sum(0)
        self.graph = out  # as it is, by mistake
        self.average += out.detach().sum()
        self.outputs.append({"sums": sums, "text": "some"})
        self.arrays.append(sums.numpy())
        self.by_class["sum"].extend(sums.tolist())
        return {"loss": nn.functional.mse_loss(out, batch[1]), "sums": sums, "names": ["a"] * len(sums)}

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.ends.append((outputs["loss"].item(), outputs["sums"].clone(), outputs["names"]))


@ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_kept_in_a_module(schedule: str) -> None:
    _, module, _, alone = both(Keeps, **SCHEDULES[schedule])
    near = {"rtol": 1e-9, "atol": 1e-12}
    assert module.ahead == alone.ahead
    torch.testing.assert_close(module.total, alone.total, **near)
    torch.testing.assert_close(module.average, alone.average, **near)
    torch.testing.assert_close(
        torch.cat([o["sums"] for o in module.outputs]), torch.cat([o["sums"] for o in alone.outputs]), **near
    )
    assert np.concatenate(module.arrays) == pytest.approx(np.concatenate(alone.arrays), rel=1e-9)
    assert module.by_class["sum"] == pytest.approx(alone.by_class["sum"], rel=1e-9)
    assert len(module.ends) == len(alone.ends) == 6
    for (loss, sums, names), (their_loss, their_sums, their_names) in zip(module.ends, alone.ends, strict=True):
        assert loss == pytest.approx(their_loss, rel=1e-9)
        torch.testing.assert_close(sums, their_sums, **near)
        assert names == their_names


class Counts(nn.Module):
    """A linear map that counts its calls, in an attribute and in a list of lists."""

    def __init__(self, out: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(6, out)
        self.calls, self.sizes = 0, [[0]]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes[0][0] += len(x)
        y: Tensor = self.linear(x)
        return y


class Remembers(nn.Module):
    """A loss without parameters that keeps its values."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def forward(self, out: Tensor, wanted: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(out, wanted)
        self.values.append(loss.item())
        return loss


class Net(nn.Module):
    """The whole model of a LightningModule, around the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Counts()
        self.blocks = nn.ModuleList([Counts() for _ in range(8)])
        self.head = Counts(3)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.calls, self.inputs, self.by_kind = 0, [], {"sums": [0.0]}  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.passes += 1
        self.inputs.extend(x[:, 0].tolist())
        self.by_kind["sums"][0] += float(x.sum())
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out = self.head(x)
        self.last = out.detach()
        y: Tensor = out
        return y


class KeepsInParts(Small):
    """Counts and lists in parts of the module; its own layers are not used."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.blocks, self.head
        self.net, self.criterion = Net(), Remembers()
        self.double()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self.criterion(self.net(batch[0]), batch[1])
        return loss


@ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_kept_in_parts_of_a_module(schedule: str) -> None:
    ours, module, _, alone = both(KeepsInParts, **SCHEDULES[schedule])
    net, want = module.net, alone.net
    assert net.calls == int(net.passes) == 4 * want.calls == 24
    assert net.inputs == want.inputs
    assert net.by_kind["sums"][0] == pytest.approx(want.by_kind["sums"][0], rel=1e-9)
    assert type(net.last) is Tensor
    assert len(module.criterion.values) == 24
    layers = [net.first, *net.blocks, net.head]  # are where they are computed
    calls = everywhere(ours, [(layer.calls, layer.sizes[0][0]) for layer in layers])
    assert [max(said) for said in zip(*calls, strict=True)] == [(24, 44)] * 10


class Normed(Small):
    """Batch statistics in the layers, ahead and behind."""

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
        self.first = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
        for block in self.blocks:
            block.append(nn.BatchNorm1d(6))
        self.double()


@ranks(2)
def test_batch_statistics_of_all_stages_are_saved_on_all_ranks() -> None:
    """One micro-batch, so that they are those of one process; all but the pictures of a rehearsal count."""
    ours, _, _, alone = both(Normed, points(16, 8), num_microbatches=1)
    state = ours.strategy.lightning_module_state_dict()
    if rank():
        return
    want = alone.state_dict()
    assert list(state) == list(want)
    assert sum("running_mean" in key for key in want) == 10
    for key, value in want.items():
        torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-9, msg=key)


class Weighed(Small):
    """The loss is a mean over those samples that count; some micro-batches have none."""

    def loss_weight(self, batch: Any) -> Tensor:
        return (batch[1][:, 0] > -9).sum()

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        return ((out - batch[1]) ** 2).mean(1)[batch[1][:, 0] > -9].mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch), batch_size=1)


@ranks(2)
def test_loss_weight_equals_one_big_batch() -> None:
    inputs, targets = points().dataset.tensors  # type: ignore[attr-defined]
    targets = targets.clone()
    targets[:3] = -9
    targets[4] = -9
    data = in_order(TensorDataset(inputs, targets), 8)
    module, alone = Weighed(), Weighed()
    ours = trainer_on_ranks(PipelineParallelStrategy(num_microbatches=4), max_epochs=2)
    theirs = trainer_alone(max_epochs=2)
    ours.fit(module, data, data)
    theirs.fit(alone, data, data)
    assert_equal_metrics(ours, theirs, rel=1e-9)
    assert_same(ours, module, alone)
