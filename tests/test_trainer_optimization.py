"""Under Lightning's Trainer: optimizers, groups, schedulers, accumulation, clipping, manual optimization."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_dist import ZeROStrategy
from lightning_dist.core.errors import UnsupportedOptimizerError
from tests.harness import ranks, world_size
from tests.lit import Regressor, assert_same_weights, fit_both, loader, trainer_alone, trainer_on_ranks, weights

STAGES = (0, 1, 2, 3)


class Lion(torch.optim.Optimizer):
    """An elementwise optimizer that torch does not ship: the sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_((0.9 * momentum + 0.1 * p.grad).sign(), alpha=-group["lr"])
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)
        return loss


class Lars(torch.optim.Optimizer):
    """Not elementwise: each tensor's step is scaled by the ratio of two norms."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / (p.grad.norm() + 1e-9)))
        return loss


class ByGlobalNorm(Lars):
    """Not elementwise in a subtler way: one norm over all tensors that it knows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        total = torch.stack([g.norm() for g in grads]).norm() if grads else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (total + 1e-9), alpha=-group["lr"])
        return loss


ELEMENTWISE = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd_momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, foreach=False),
    "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "adamw_amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, amsgrad=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9, centered=True),
    "lion": lambda m: Lion(m.parameters(), lr=1e-3),
}
REFUSED = {
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters()),
    "muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2]),
    "lars": lambda m: Lars(m.parameters()),
    "global_norm": lambda m: ByGlobalNorm(m.parameters()),
}


@ranks(2, 4)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_equal_one_process(stage: int, name: str) -> None:
    trainer, ours, alone, reference = fit_both(stage, lambda: Regressor(ELEMENTWISE[name]), max_steps=5)
    assert trainer.global_step == alone.global_step == 5
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


@ranks(2)
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("name", REFUSED)
def test_other_optimizers_are_refused_by_name(stage: int, name: str) -> None:
    module = Regressor(REFUSED[name])
    with pytest.raises(UnsupportedOptimizerError) as refusal:
        trainer_on_ranks(stage, max_steps=1).fit(module, loader())
    kind = {"adafactor": "Adafactor", "lbfgs": "LBFGS", "muon": "Muon", "lars": "Lars", "global_norm": "ByGlobalNorm"}
    assert kind[name] in str(refusal.value)
    assert "AdamW" in str(refusal.value)


def decay_groups(module: L.LightningModule) -> torch.optim.Optimizer:
    """What most training scripts do: matrices decay, the rest does not; the head has a learning rate of its own."""
    named = dict(module.named_parameters())
    decay = [p for n, p in named.items() if p.ndim >= 2 and not n.startswith("last")]
    plain = [p for n, p in named.items() if p.dim() < 2 and not n.startswith("last")]
    head = [p for n, p in named.items() if n.startswith("last")]
    groups = [
        {"params": decay, "weight_decay": 0.5},
        {"params": plain, "weight_decay": 0.0},
        {"params": head, "lr": 3e-2, "weight_decay": 0.5},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


@ranks(2, 4)
@pytest.mark.parametrize("stage", STAGES)
def test_decay_groups_by_ndim_and_name(stage: int) -> None:
    trainer, ours, alone, reference = fit_both(stage, lambda: Regressor(decay_groups), max_steps=5)
    counts = [len(g["params"]) for g in trainer.optimizers[0].param_groups]
    assert counts == [len(g["params"]) for g in alone.optimizers[0].param_groups] == [7, 10, 2]
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


class Counting(Regressor):
    """Counts the hooks that accumulation must not disturb."""

    def __init__(self) -> None:
        super().__init__(
            lambda m: (
                [o := torch.optim.SGD(m.parameters(), 0.1)],
                [{"scheduler": torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.9), "interval": "step"}],
            )
        )
        self.calls: dict[str, int] = {}
        self.rates: list[float] = []

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._count("before_step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._count("zero_grad")

    def on_after_backward(self) -> None:
        self._count("backward")

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]


@ranks(2)
@pytest.mark.parametrize(
    ("stage", "accumulate"), [(0, "shard"), (1, "shard"), (2, "shard"), (2, "local"), (3, "shard"), (3, "local")]
)
def test_accumulation_keeps_its_meaning(stage: int, accumulate: str) -> None:
    """10 batches, windows of 4: the last one is incomplete."""
    strategy = ZeROStrategy(stage, accumulate=accumulate)  # type: ignore[arg-type]
    ours, reference = Counting(), Counting()
    samples = 10 * 2 * world_size()
    trainer = trainer_on_ranks(strategy, max_epochs=2, accumulate_grad_batches=4)
    trainer.fit(ours, loader(samples))
    alone = trainer_alone(max_epochs=2, accumulate_grad_batches=4)
    alone.fit(reference, loader(samples, alone=True))
    assert ours.calls == reference.calls == {"before_step": 6, "zero_grad": 6, "backward": 20}
    assert trainer.global_step == alone.global_step == 6
    assert ours.rates == reference.rates
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulate", ("shard", "local"))
def test_reductions_per_optimizer_step(stage: int, accumulate: str) -> None:
    """Stages 0, 1 and "local" reduce each group once per step; "shard" once per micro-batch."""
    strategy = ZeROStrategy(stage, accumulate=accumulate)  # type: ignore[arg-type]
    trainer = trainer_on_ranks(strategy, max_steps=1, accumulate_grad_batches=4)
    trainer.fit(Regressor(), loader())
    engine = strategy.engine
    reductions = engine.mesh.ledger.count(purpose="gradients")
    each = stage >= 2 and accumulate == "shard"
    assert reductions == len(engine.groups) * (4 if each else 1)


@ranks(2)
@pytest.mark.parametrize("stage", (2, 3))
def test_sharded_accumulation_keeps_only_shards(stage: int) -> None:
    """Between micro-batches "shard" holds total/world gradient bytes (and padding), "local" the total."""
    held: dict[str, int] = {}

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 2:
                return  # the end of the window: reduced
            held[accumulate] = sum(g.local_bytes()["gradients"] for g in trainer.strategy.engine.groups)

    for accumulate in ("shard", "local"):
        strategy = ZeROStrategy(stage, accumulate=accumulate)  # type: ignore[arg-type]
        options: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 4, "callbacks": [Watch()]}
        trainer_on_ranks(strategy, **options).fit(Regressor(), loader(2 * 3 * world_size()))
    padded = sum(g.padded for g in strategy.engine.groups) * 8
    assert held["shard"] == padded // world_size()
    assert padded <= held["local"] <= padded + padded // world_size()


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.1), ("value", 0.01)])
def test_clipping_equals_one_process(stage: int, algorithm: str, value: float) -> None:
    norms: dict[str, list[float]] = {"ours": [], "alone": []}

    class Clipped(Regressor):
        where = ""

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.where == "ours":
                norms["ours"].append(float(self.trainer.strategy.grad_norm()))  # type: ignore[attr-defined]
            else:
                norms["alone"].append(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm()))

    ours, reference = Clipped(), Clipped()
    ours.where, reference.where = "ours", "alone"
    options: dict[str, Any] = {"max_steps": 4, "gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    trainer, alone = trainer_on_ranks(stage, **options), trainer_alone(**options)
    trainer.fit(ours, loader())
    alone.fit(reference, loader(alone=True))
    assert norms["ours"] == pytest.approx(norms["alone"], rel=1e-10)
    assert min(norms["alone"]) > value, "nothing was clipped"
    assert len(set(trainer.strategy.mesh.rollcall.exchange(tuple(norms["ours"])))) == 1  # type: ignore[attr-defined]
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_in_the_users_hook(stage: int) -> None:
    class Own(Regressor):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    trainer, ours, alone, reference = fit_both(stage, Own, max_steps=4)
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


@ranks(2, 4)
@pytest.mark.parametrize("stage", (0, 1, 3))
@pytest.mark.parametrize("norm_type", (1.0, 2.0, float("inf")))
def test_norms_by_parameter(stage: int, norm_type: float) -> None:
    """Our helper gives what Lightning's `grad_norm` gives in one process, on every rank."""
    from lightning.pytorch.utilities import grad_norm

    found: dict[str, dict[str, float]] = {}

    class Inspect(Regressor):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            strategy = self.trainer.strategy
            if isinstance(strategy, ZeROStrategy):
                found["ours"] = strategy.grad_norms(norm_type)
                with strategy.gathered(gradients=True):
                    found["gathered"] = {k: float(v) for k, v in grad_norm(self, norm_type).items()}
            else:
                found["alone"] = {k: float(v) for k, v in grad_norm(self, norm_type).items()}

    fit_both(stage, Inspect, max_steps=1)
    assert len(found["alone"]) == 20
    assert found["ours"] == pytest.approx(found["alone"], rel=1e-8)
    assert found["gathered"] == pytest.approx(found["alone"], rel=1e-8)


class Gan(L.LightningModule):
    """Two networks, two optimizers, two schedulers, manual optimization."""

    def __init__(self, *, toggle: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.toggle = toggle
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.double()

    def training_step(self, batch: Any, index: int) -> None:
        noise = batch[0].flip(1)
        generator, critic = self.optimizers()  # type: ignore[attr-defined]
        if self.toggle:
            self.toggle_optimizer(generator)
        generator.zero_grad()
        self.manual_backward(-self.critic(self.generator(noise)).mean())
        generator.step()
        if self.toggle:
            self.untoggle_optimizer(generator)
        critic.zero_grad()
        self.manual_backward(self.critic(self.generator(noise).detach()).mean())
        self.manual_backward(-self.critic(batch[0]).mean())  # a second backward adds to the first
        critic.step()
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam(self.generator.parameters(), 1e-2)
        critic = torch.optim.RMSprop(self.critic.parameters(), 1e-2)
        rates = [torch.optim.lr_scheduler.ExponentialLR(o, gamma) for o, gamma in ((generator, 0.9), (critic, 0.8))]
        return [generator, critic], rates


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("toggle", (True, False))
def test_gan_with_two_optimizers_by_hand(stage: int, toggle: bool) -> None:
    trainer, ours, alone, reference = fit_both(stage, lambda: Gan(toggle=toggle), max_steps=10)
    rates = [[g["lr"] for g in o.param_groups] for o in trainer.optimizers]
    assert rates == [[g["lr"] for g in o.param_groups] for o in alone.optimizers]
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


@ranks(2)
def test_backward_past_the_strategy_is_an_error() -> None:
    class Direct(Gan):
        def training_step(self, batch: Any, index: int) -> None:
            self.critic(batch[0]).mean().backward()

    with pytest.raises(Exception, match="manual_backward"):
        trainer_on_ranks(3, max_steps=1).fit(Direct(toggle=False), loader())


SCHEDULES: dict[str, Any] = {
    "one_cycle": lambda o: {
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=60),
        "interval": "step",
    },
    "cosine": lambda o: {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(o, 5), "interval": "epoch"},
    "plateau": lambda o: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
        "monitor": "val_loss",
    },
}


class Scheduled(Regressor):
    """Records the learning rate of every step."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.schedule, self.rates = schedule, []  # type: tuple[str, list[float]]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULES[self.schedule](optimizer)}

    def on_train_batch_start(self, *_: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]


@ranks(2)
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rates_equal_one_process_also_after_resume(stage: int, schedule: str, tmp_path: Any) -> None:
    _, ours, _, reference = fit_both(stage, lambda: Scheduled(schedule), val=True, max_epochs=4)
    assert len(reference.rates) > 10 and len(set(reference.rates)) > 1  # type: ignore[arg-type]
    assert ours.rates == pytest.approx(reference.rates, rel=1e-12)
    first, second = Scheduled(schedule), Scheduled(schedule)
    trainer = trainer_on_ranks(stage, max_epochs=2)
    trainer.fit(first, loader(), loader(seed=1))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    trainer_on_ranks(stage, max_epochs=4).fit(second, loader(), loader(seed=1), ckpt_path=tmp_path / "half.ckpt")
    assert first.rates + second.rates == pytest.approx(reference.rates, rel=1e-12)


@ranks(2)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_gradients_of_unused_parameters_stay_absent(stage: int) -> None:
    """A parameter without a gradient is not decayed and gets no optimizer state, as in one process."""

    class Extra(Regressor):
        def __init__(self) -> None:
            super().__init__(lambda m: torch.optim.AdamW(m.parameters(), 1e-2, weight_decay=0.5))
            self.spare = nn.Parameter(torch.ones(5, dtype=torch.float64))

    trainer, ours, alone, reference = fit_both(stage, Extra, max_steps=3)
    got = weights(trainer, ours)
    assert torch.equal(got["spare"], torch.ones(5, dtype=torch.float64))
    assert_same_weights(got, weights(alone, reference))


def swept() -> int:
    """Cases of the optimizer sweep."""
    return len(ELEMENTWISE) * len(STAGES) * 2 + len(REFUSED) * 2


def test_the_sweep_is_as_large_as_claimed() -> None:
    assert swept() == 82
