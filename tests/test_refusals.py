"""Bad input: a clear error at construction or setup, on every rank, that names cause and remedy."""

from __future__ import annotations

import builtins
import inspect
import random
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_dist import HybridStrategy, PipelineParallelStrategy, TensorParallelStrategy, ZeROStrategy
from lightning_dist.comm import Mesh
from lightning_dist.core.errors import ConfigurationError, UnsupportedModelError
from lightning_dist.core.layout import Layout
from lightning_dist.pipeline.schedule import parse_action
from lightning_dist.strategies.base import _arguments
from lightning_dist.zero import ZeroEngine
from lightning_dist.zero.refusals import refuse_unsupported
from tests.harness import ranks, run_script, world_size
from tests.lit import Regressor, assert_same_weights, fit_both, loader, trainer_on_ranks, weights

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["zero4", "zero", "zero3_tp2", "3d_zero9", "tp3", "pp3", "ZERO9"])
def test_unknown_names_explain_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"zero0.*zero3"):
        L.Trainer(strategy=name, accelerator="cpu", devices=2)


def test_known_names_and_foreign_names_still_work() -> None:
    for stage in range(4):
        for name in (f"zero{stage}", f"ZERO{stage}"):
            strategy = L.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
            assert isinstance(strategy, ZeROStrategy)
            assert strategy.stage == stage
    L.Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False)
    with pytest.raises(ValueError, match="invalid strategy name"):
        L.Trainer(strategy="no_such_thing", accelerator="cpu", devices=2)


KINDS = (ZeROStrategy, TensorParallelStrategy, PipelineParallelStrategy, HybridStrategy)
NO_COUNT: list[Any] = [0, -1, 1.5, "2", True, [2]]
NO_NAME: list[Any] = ["no such", 1, b"shard", ["error"]]
NO_FLAG: list[Any] = [None, 1, "yes"]
NO_STAGE: list[Any] = [4, -1, 3.0, "3", True, None, [3]]
NO_PLUGIN: list[Any] = ["cpu", 1]
WRONG: dict[str, list[Any]] = {
    "accelerator": NO_PLUGIN,
    "parallel_devices": ["cpu", 2, [0, 1]],
    "cluster_environment": NO_PLUGIN,
    "checkpoint_io": NO_PLUGIN,
    "precision_plugin": NO_PLUGIN,
    "start_method": [*NO_NAME, None],
    "process_group_backend": [1, "", ["gloo"]],
    "timeout": [60, "60", timedelta(0), None],
    "keep_freed_memory": NO_FLAG,
    "master_weights": NO_FLAG,
    "on_nonfinite": [*NO_NAME, None],
    "on_uneven": [*NO_NAME, None],
    "checkpoint_format": [*NO_NAME, None],
    "check_replicas_every": [-1, 1.5, "2", True, None],
    "stage": NO_STAGE,
    "zero": NO_STAGE,
    "accumulate": [*NO_NAME, None],
    "prefetch_bytes": [-1, 1e6, "1 GB", True],
    "tp": NO_COUNT,
    "sequence_parallel": NO_FLAG,
    "tp_plan": ["colwise", 3, ["colwise"], {"head": 1}, {1: "colwise"}],
    "pp": NO_COUNT,
    "num_microbatches": NO_COUNT,
    "schedule": [None, 42, "", [], [[]], [["F0.0"]], {}],
    "virtual_stages": NO_COUNT,
    "layers": [3, "", [], [1], {"layers": 1}, b"layers"],
    "split": [3, "33", [], [3.0, 3.0], [0, 6], [True, 5]],
    "place": ["last", ["head"], {"head": "middle"}, {"head": 1}, {1: "last"}],
    "recompute": [True, "selective", 1, ["full"]],
}


def test_every_argument_refuses_what_it_does_not_take() -> None:
    swept = {(kind, name) for kind in KINDS for name in _arguments(kind()) if (kind, name) != (HybridStrategy, "stage")}
    assert {name for _, name in swept} == WRONG.keys()
    cases = [(kind, name, value) for kind, name in swept for value in [*WRONG[name], object()]]
    for kind, name, value in cases:
        with pytest.raises(ConfigurationError) as refusal:
            kind(**{name: value})
        assert str(refusal.value).startswith(f"{name}={value!r} is not "), (kind, name, value)
    assert (len(swept), len(cases)) == (83, 426)


def test_every_argument_takes_what_it_says() -> None:
    for kind in KINDS:
        plain = {name: p.default for k in kind.__mro__[:-1] for name, p in inspect.signature(k).parameters.items()}
        kind(**{name: plain[name] for name in _arguments(kind()) if (kind, name) != (HybridStrategy, "stage")})
    schedule = [[parse_action("F0.0"), parse_action("B0.0")]]
    PipelineParallelStrategy(1, schedule=schedule, layers=["a", "b"], split=(1, 2), place={"head": "last"})
    PipelineParallelStrategy(num_microbatches=1, schedule=Path("mine.txt"), virtual_stages=2, recompute="full")
    TensorParallelStrategy(1, tp_plan={"head": "colwise"}, timeout=timedelta(seconds=1), process_group_backend="gloo")


class Sparse(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True)


class Integer(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)


class Lazy(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(4)


class Complex(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(4, dtype=torch.complex64))


MODELS = [
    (Sparse, "table.*sparse=False"),
    (Integer, "codes.*uint8"),
    (Lazy, "lazy.*batch"),
    (Complex, "phase.*complex"),
]


@ranks(2)
@pytest.mark.parametrize(("kind", "words"), MODELS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("stage", (0, 3))
def test_models_that_cannot_be_sharded(kind: type[Regressor], words: str, stage: int) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        trainer_on_ranks(stage, max_steps=1).fit(kind(), loader())


class Pieces(nn.Module):
    """Tensors as they are, as parameters and as buffers (which no state dict holds)."""

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor] = ()) -> None:
        super().__init__()
        for index, values in enumerate(parameters):
            self.register_parameter(f"p{index}", nn.Parameter(values))
        for index, values in enumerate(buffers):
            self.register_buffer(f"b{index}", values, persistent=False)


def refused(module: nn.Module) -> str:
    try:
        refuse_unsupported(module, torch.device("cpu"))
    except UnsupportedModelError as error:
        return str(error)
    return ""


def any_view(memory: Tensor, draw: random.Random) -> Tensor:
    """A slice of a matrix, whole or with steps, perhaps turned, flattened or read as twice as many narrower numbers."""
    view = memory.view(draw.choice(((4, 12), (8, 6), (48, 1), (6, 8))))
    for dim in range(2):
        start = draw.randrange(view.shape[dim])
        stop = draw.randint(start + 1, view.shape[dim])
        view = view[(slice(None),) * dim + (slice(start, stop, draw.choice((1, 1, 2, 3))),)]
    if view.stride(1) == 1 and draw.random() < 0.2:
        return view.view(torch.float32)
    return draw.choice((view, view.t(), view[0], view[:, 0]))


def places(view: Tensor, memory: Tensor) -> set[int]:
    """The bytes that a view holds, one by one."""
    size, first = view.element_size(), view.data_ptr() - memory.data_ptr()
    offsets = (sum(i * s for i, s in zip(index, view.stride(), strict=True)) for index in np.ndindex(*view.shape))
    return {first + size * offset + byte for offset in offsets for byte in range(size)}


def test_memory_that_two_tensors_share_is_refused_and_none_that_lies_between() -> None:
    """1500 pairs of random slices of one storage, as two parameters and as a parameter and a buffer, counted out."""
    draw, told = random.Random(0), Counter[tuple[bool, bool]]()
    for _ in range(1500):
        memory = torch.zeros(48, dtype=torch.float64)
        one, other = any_view(memory, draw), any_view(memory, draw)
        share = bool(places(one, memory) & places(other, memory))
        lower, upper = sorted((one, other), key=Tensor.data_ptr)
        told[share, upper.data_ptr() < lower.data_ptr() + lower.element_size() * lower.numel()] += 1
        assert bool(refused(Pieces([one, other]))) == share
        assert bool(refused(Pieces([one], [other]))) == share
    assert len(told) == 4 and min(told.values()) > 40  # no first address and no number of bytes tells them apart


def test_who_shares_memory_is_named_among_many() -> None:
    memory = torch.zeros(6, 40)
    columns = list(memory.unbind(1))
    assert not refused(Pieces(columns))
    assert "parameters p7 and p40 share memory" in refused(Pieces([*columns, memory[2:4, 7]]))
    assert "buffer b1 shares memory with parameter p39" in refused(Pieces(columns, [torch.zeros(3), memory[5, 39:]]))


def test_buffers_that_hold_less_than_their_shape_are_no_neighbours() -> None:
    memory = torch.zeros(20)
    assert not refused(Pieces([memory[1:]], [memory[:1].expand(5)]))
    assert "buffer b0" in refused(Pieces([memory[1:]], [memory[1:2].expand(5)]))
    assert not refused(Pieces([memory], [torch.eye(3).to_sparse(), torch.zeros(7, device="meta"), memory[:0]]))


@ranks(2)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_interleaved_parameters_train_as_in_one_process(stage: int) -> None:
    class Columns(Regressor):
        def __init__(self) -> None:
            super().__init__()
            both = torch.cat([self.blocks[0].up.weight.detach(), self.blocks[1].up.weight.detach()], 1)  # type: ignore
            for block, half in zip(self.blocks, both.chunk(2, 1), strict=False):
                block.up.weight = nn.Parameter(half)  # type: ignore[union-attr]

    trainer, ours, alone, reference = fit_both(stage, Columns, max_steps=2)
    assert_same_weights(weights(trainer, ours), weights(alone, reference))


@ranks(2)
def test_a_parameter_on_the_wrong_device() -> None:
    module = Regressor()
    module.last.weight = nn.Parameter(torch.empty_like(module.last.weight, device="meta"))
    with pytest.raises(UnsupportedModelError, match=r"last\.weight.*meta"):
        ZeroEngine(module, Mesh.from_world(Layout(dp=world_size())), stage=3)


@ranks(2)
def test_a_layout_that_does_not_fill_the_world() -> None:
    with pytest.raises(ConfigurationError, match="needs 6 ranks but the world has 2"):
        Mesh.from_world(Layout(dp=3, tp=2))


@ranks(2)
def test_an_optimizer_of_foreign_parameters() -> None:
    module = Regressor(lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.zeros(3, 5))], lr=0.1))
    with pytest.raises(ConfigurationError, match=r"not in the module.*\(3, 5\)"):
        trainer_on_ranks(2, max_steps=1).fit(module, loader())


@ranks(2)
def test_gathering_what_is_not_sharded() -> None:
    trainer = trainer_on_ranks(3, max_steps=1)
    trainer.fit(Regressor(), loader())
    strategy = trainer.strategy
    assert isinstance(strategy, ZeROStrategy)
    with pytest.raises(ConfigurationError, match="do not belong"), strategy.gathered(nn.Linear(2, 2)):
        pass


@ranks(2)
def test_a_checkpoint_of_other_parameter_groups(tmp_path: Path) -> None:
    one = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    two = lambda m: torch.optim.SGD([{"params": p.parameters()} for p in (m.first, m.blocks)], lr=0.1)  # noqa: E731
    trainer = trainer_on_ranks(2, max_epochs=1, limit_train_batches=1)
    trainer.fit(Regressor(one), loader())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ConfigurationError, match="parameter groups"):
        trainer_on_ranks(2, max_epochs=2).fit(Regressor(two), loader(), ckpt_path=tmp_path / "one.ckpt")


def test_properties_before_a_run_say_what_to_do() -> None:
    strategy = ZeROStrategy(3)
    for name in ("engine", "mesh"):
        with pytest.raises(ConfigurationError, match=r"trainer\.fit"):
            getattr(strategy, name)


MIXED_NAMES = """
import pytorch_lightning as pl
import lightning_dist
pl.Trainer(strategy="zero3", accelerator="cpu", devices=2)
"""


def test_mixing_the_two_lightnings_is_explained() -> None:
    result = run_script(MIXED_NAMES, expect=1, timeout=300)
    assert "import lightning as L" in result.output


MIXED_OBJECTS = """
import pytorch_lightning as pl
import lightning_dist
pl.Trainer(strategy=lightning_dist.ZeROStrategy(3), accelerator="cpu", devices=2)
"""


def test_a_strategy_given_to_the_other_trainer_is_explained() -> None:
    result = run_script(MIXED_OBJECTS, expect=1, timeout=300)
    assert "import lightning as L" in result.output


BROKEN_DEEPSPEED = """
import sys
import lightning as L
import torch
import lightning_dist
from lightning.pytorch.demos.boring_classes import BoringModel
assert "deepspeed" not in sys.modules
trainer = L.Trainer(accelerator="cpu", devices=1, strategy="zero3", max_steps=1, logger=False)
trainer.fit(BoringModel())
print("trained")
"""


def test_a_broken_deepspeed_disturbs_nothing(tmp_path: Path) -> None:
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('built for another torch')")
    result = run_script(BROKEN_DEEPSPEED, directory=tmp_path, timeout=300)
    assert "trained" in result.output


def test_import_needs_no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "deepspeed":
            raise ImportError("not installed")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for name in [n for n in sys.modules if n.startswith("lightning_dist")]:
        monkeypatch.delitem(sys.modules, name)
    import lightning_dist

    assert lightning_dist.__version__
