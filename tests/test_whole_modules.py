"""A sharded module as an object: copied, pickled, converted, compiled, averaged; and engines that are misused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor, nn

from lightning_dist import PipelineParallelStrategy, ShardedStrategy, TensorParallelStrategy, ZeROStrategy
from lightning_dist.comm import Mesh
from lightning_dist.core.errors import ConfigurationError, LightningDistError, UnsupportedModelError
from lightning_dist.core.layout import Layout
from lightning_dist.zero import ZeroEngine
from tests.harness import rank, ranks, world_size
from tests.lit import Regressor, assert_same_weights, fit_both, loader, trainer_on_ranks, weights

STAGES = (0, 1, 2, 3)


def mesh() -> Mesh:
    return Mesh.from_world(Layout(dp=world_size()))


def stack(depth: int = 3, width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]).double()


# Copies, pickles, conversions -------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_taken_inside_gathered_is_a_plain_module(stage: int) -> None:
    module = Regressor()
    user = module.first.register_forward_hook(lambda m, args, out: out + 1.0)
    trainer = trainer_on_ranks(stage, max_steps=2)
    trainer.fit(module, loader())
    with trainer.strategy.gathered(module):  # type: ignore[attr-defined]
        copied = copy.deepcopy(module)
        layer = copy.deepcopy(module.blocks[1])
    want = weights(trainer, module)
    assert_same_weights({n: p.detach() for n, p in copied.named_parameters()}, want, rel=0.0)
    assert_same_weights(dict(layer.state_dict()), {n[9:]: v for n, v in want.items() if n[:9] == "blocks.1."}, rel=0.0)
    assert {type(p) for p in copied.parameters()} == {nn.Parameter}
    assert [len(sub._forward_hooks) + len(sub._forward_pre_hooks) for sub in copied.modules()].count(1) == 1
    sent = trainer.strategy.mesh.ledger  # type: ignore[attr-defined]
    with sent.measure() as traffic:
        x = torch.ones(2, 8, dtype=torch.float64)
        if rank() == 0:  # it needs nobody: a rank may use it alone
            copied(x).sum().backward()
            layer(x).sum().backward()
            copied.to(torch.float32)
            again = pickle.loads(pickle.dumps(layer))
            assert torch.equal(again.up.weight, layer.up.weight)
    assert traffic.total() == 0
    user.remove()
    module.zero_grad()
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, loader())  # the original goes on training
    assert trainer.global_step == 4
    assert copied.first.weight.dtype == (torch.float32 if rank() == 0 else torch.float64)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_copies_and_pickles_elsewhere(stage: int) -> None:
    module = Regressor()
    trainer = trainer_on_ranks(stage, max_steps=1)
    trainer.fit(module, loader())
    for pickles in (
        lambda: pickle.dumps(module),
        lambda: torch.save(module, io.BytesIO()),
        lambda: torch.save({"model": module.blocks[0]}, io.BytesIO()),
    ):
        with pytest.raises(LightningDistError, match=r"strategy\.full_state_dict\(\).*gathered"):
            pickles()
    if stage == 3:
        with pytest.raises(LightningDistError, match=r"gathered\(module\).*full_state_dict"):
            copy.deepcopy(module)
    else:
        copied = copy.deepcopy(module)
        assert_same_weights({n: p.detach() for n, p in copied.named_parameters()}, weights(trainer, module), rel=0.0)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_conversions(stage: int) -> None:
    module = Regressor()
    module.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
    trainer = trainer_on_ranks(stage, max_steps=1)
    trainer.fit(module, loader())
    before = weights(trainer, module)
    identity = [id(p) for p in module.parameters()]
    for same in (
        lambda: module.to("cpu"),
        lambda: module.cpu(),
        lambda: module.double(),
        lambda: module.blocks[0].to(torch.float64),
        lambda: module.to(dtype=torch.float64, device="cpu"),
        lambda: module.last.double(),
    ):
        same()
    for change in (
        lambda: module.half(),
        lambda: module.float(),
        lambda: module.to(torch.bfloat16),
        lambda: module.to("meta"),
        lambda: module.blocks[1].up.float(),
        lambda: module.blocks.to(torch.float32),
    ):
        with pytest.raises(LightningDistError, match=r"cannot be converted: .*weight is torch\.float64 .*precision"):
            change()
    assert [id(p) for p in module.parameters()] == identity
    assert module.mean.dtype is torch.float64
    assert_same_weights(weights(trainer, module), before, rel=0.0)
    assert trainer.validate(module, loader(), verbose=False)[0]["val_loss"] > 0


@ranks(2)
def test_a_module_that_was_given_back_is_ordinary() -> None:
    model = stack()
    before = set(vars(model[0]))
    engine = ZeroEngine(model, mesh(), stage=3)
    engine.remove()
    assert set(vars(model[0])) == before
    pickle.dumps(model)
    assert model.float()[0].weight.dtype is torch.float32


# Compiled layers ----------------------------------------------------------------------------------------------------


class Compiled(Regressor):
    """Compiles its blocks: in place, or wrapped."""

    def __init__(self, backend: str, wrap: bool) -> None:
        super().__init__()
        for index, block in enumerate(self.blocks):
            if wrap:
                self.blocks[index] = torch.compile(block, backend=backend)  # type: ignore[assignment]
            else:
                block.compile(backend=backend)


@ranks(2, timeout=180)
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
@pytest.mark.parametrize("wrap", (False, True))
def test_compiled_layers_equal_plain_ones(stage: int, backend: str, wrap: bool) -> None:
    torch._dynamo.reset()
    plain = Regressor()
    trainer = trainer_on_ranks(stage, max_steps=3)
    trainer.fit(plain, loader())
    want = weights(trainer, plain)
    compiled = Compiled(backend, wrap)
    torch._dynamo.utils.counters.clear()
    again = trainer_on_ranks(stage, max_steps=3)
    again.fit(compiled, loader())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    got = {name.replace("_orig_mod.", ""): value for name, value in weights(again, compiled).items()}
    assert_same_weights(got, want, rel=1e-12)
    torch._dynamo.reset()


# Misuse -------------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", (False, True))
def test_an_optimizer_that_was_not_adopted(stage: int, kind: Any, foreach: bool) -> None:
    model = stack()
    engine = ZeroEngine(model, mesh(), stage=stage)
    optimizer = kind(model.parameters(), lr=0.1, foreach=foreach)
    with engine.gathered(model):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with engine.step():
        engine.backward(model(torch.ones(2, 6, dtype=torch.float64)).sum())
    with pytest.raises(LightningDistError, match="adopt"):
        optimizer.step()
    with engine.gathered(model):
        assert_same_weights({n: p.detach() for n, p in model.named_parameters()}, before, rel=0.0)


@ranks(2)
@pytest.mark.parametrize("stage", (0, 3))
def test_two_engines_on_one_module(stage: int) -> None:
    model = stack()
    engine = ZeroEngine(model, mesh(), stage=stage)
    for part in (model, model[0], nn.ModuleList([model[1], nn.Linear(2, 2)])):
        with pytest.raises(ConfigurationError, match=r"sharded already.*remove\(\)"):
            ZeroEngine(part, mesh(), stage=stage)
    engine.remove()
    ZeroEngine(model, mesh(), stage=stage)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_without_its_module(stage: int) -> None:
    model = stack()
    engine = ZeroEngine(model, mesh(), stage=stage)
    with engine.step():
        loss = model(torch.ones(2, 6, dtype=torch.float64)).sum()
        engine.backward(loss)
    engine.remove()
    for use in (
        lambda: engine.backward(loss),
        lambda: engine.begin_step(),
        lambda: engine.gathered(model).__enter__(),
        lambda: engine.adopt(torch.optim.SGD(model.parameters(), lr=0.1)),
        lambda: engine.remove(),
    ):
        with pytest.raises(LightningDistError, match=r"given its module back by remove\(\).*construct"):
            use()
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()  # an ordinary module


class Aliased(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shadow", self.last.weight.detach()[1:])


class Expanded(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64).expand(4, 2))


class Windows(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.windows = nn.Parameter(torch.arange(6.0).double().unfold(0, 3, 1))


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Aliased, r"buffer shadow shares memory with parameter last\.weight.*clone"),
        (Expanded, r"parameter scale .*\(4, 2\), strides \(0, 0\).*clone"),
        (Windows, r"parameter windows .*strides \(1, 1\)"),
    ],
)
def test_memory_that_is_used_twice_is_refused_by_name(kind: type[Regressor], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        trainer_on_ranks(2, max_steps=1).fit(kind(), loader())


@ranks(2)
def test_other_strides_are_taken() -> None:
    """Transposed, sliced and channels-last parameters hold each element once."""

    class Strided(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.randn(5, 3, dtype=torch.float64).t())
            self.cut = nn.Parameter(torch.randn(4, 6, dtype=torch.float64)[:, ::2])
            self.image = nn.Parameter(
                torch.randn(2, 3, 4, 4, dtype=torch.float64).to(memory_format=torch.channels_last)
            )

    def seeded() -> Strided:
        return Strided()

    trainer, ours, alone, reference = fit_both(3, seeded, max_steps=1)
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


# Memory between steps -------------------------------------------------------------------------------------------------


def live_bytes() -> int:
    """Bytes of all tensors of the process, each storage once."""
    storages: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
        for thing in gc.get_objects():
            if type(thing).__module__.startswith(("torch", "lightning_dist")) and isinstance(thing, Tensor):
                with torch._C.DisableTorchFunctionSubclass():
                    for tensor in (thing, thing.grad if thing.is_leaf else None):
                        if tensor is not None and tensor.device.type == "cpu" and tensor.layout is torch.strided:
                            storage = tensor.untyped_storage()
                            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@ranks(2, 4)
@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("by", ("optimizer", "module"))
@pytest.mark.parametrize("accumulating", (False, True))
def test_memory_between_steps_is_parameters_and_optimizer_state(stage: int, by: str, accumulating: bool) -> None:
    """Once gradients are dropped nothing of them is left: 4Ψ/N + 8Ψ/N (stages 1, 2: 4Ψ + 8Ψ/N) and crumbs.

    Shared memory apart: what is mapped there counts as a tensor, but takes pages only for what is under way.
    """
    before = live_bytes()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    psi = sum(p.numel() for p in model.parameters())
    engine = ZeroEngine(model, Mesh.from_world(Layout(dp=world_size()), shared_memory=False), stage=stage)
    optimizer = torch.optim.AdamW(model.parameters())
    engine.adopt(optimizer)
    for sync in (True, not accumulating):
        with engine.step():
            engine.backward(model(torch.ones(2, 64)).pow(2).mean(), sync=sync)
        if sync:
            optimizer.step()
        (optimizer if by == "optimizer" else model).zero_grad()
        if by == "module":
            engine.begin_step("eval")  # notices it
            engine.end_step()
        n = world_size()
        rest = (4 * psi // n if stage == 3 else 4 * psi) + 8 * psi // n
        assert rest <= live_bytes() - before <= rest + 1000


class WithExample(Regressor):
    """The summary shows sizes of inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(3, 8, dtype=torch.float64)


@ranks(2)
@pytest.mark.parametrize("strategy", ["zero3", "tp", "pp"])
def test_summary_with_an_example_input(strategy: str) -> None:
    made: dict[str, ShardedStrategy] = {
        "zero3": ZeROStrategy(3),
        "tp": TensorParallelStrategy(tp_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}),
        "pp": PipelineParallelStrategy(num_microbatches=2),
    }
    summary = ModelSummary(max_depth=2)
    trainer = trainer_on_ranks(made[strategy], max_steps=1, enable_model_summary=True, callbacks=[summary])
    module = WithExample()
    trainer.fit(module, loader(alone=strategy != "zero3"))
    assert module.example_input_array is not None
    sizes = summary._summary(trainer, module).out_sizes
    assert ("[3, 3]" in str(sizes)) == (strategy != "pp"), sizes
