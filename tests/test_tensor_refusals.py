"""What tensor parallelism refuses, in words, on all ranks; and what it warns of."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dist import TensorParallelStrategy
from lightning_dist.core.errors import ConfigurationError, RankMismatchError, UnsupportedModelError
from lightning_dist.core.shard import cut_of
from tests.harness import rank, ranks, world_size
from tests.lit import trainer_on_ranks
from tests.tp.lit import Lit, assert_same, fit_both, texts
from tests.tp.models import TOKENS, VOCAB, HandWrittenGPT

PLAN = HandWrittenGPT.PLAN


def refusal(module: L.LightningModule, strategy: TensorParallelStrategy | None = None, **options: Any) -> str:
    """The words of an error at setup; no step is made."""
    steps: list[int] = []

    class Count(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            steps.append(1)

    trainer = trainer_on_ranks(strategy or TensorParallelStrategy(), max_steps=1, callbacks=[Count()])
    with pytest.raises((ConfigurationError, UnsupportedModelError, RankMismatchError)) as error:
        trainer.fit(module, texts(**options))
    assert not steps
    return str(error.value)


def with_plan(plan: Mapping[str, str] | None, name: str = "hand_written") -> Lit:
    module = Lit(name)
    module.tp_plan = plan if plan is None else {f"model.{k}": v for k, v in plan.items()}
    return module


@ranks(3)
def test_heads_that_do_not_divide() -> None:
    words = refusal(Lit("llama"))
    assert "tp=3 does not divide num_attention_heads=4" in words
    assert re.search(r"use tp=1, 2, 4$", words)
    assert "q_proj" in words


@ranks(3)
def test_key_value_heads_that_do_not_divide() -> None:
    """6 heads would divide, the 2 that they share do not."""

    class Grouped(Lit):
        def __init__(self) -> None:
            super().__init__("llama")
            import transformers

            config = transformers.LlamaConfig(
                hidden_size=24,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=6,
                num_key_value_heads=2,
                vocab_size=VOCAB,
            )
            self.model = transformers.LlamaForCausalLM(config).double()

    words = refusal(Grouped())
    assert "tp=3 does not divide num_key_value_heads=2" in words
    assert re.search(r"use tp=1, 2$", words)


@ranks(2)
def test_plans_that_say_nothing_or_too_much() -> None:
    words = refusal(with_plan({**PLAN, "blocks.*.mlp.up": "colwise"}))
    assert 'tp_plan["model.blocks.*.mlp.up"] names nothing' in words
    assert "model.blocks.0" in words
    words = refusal(with_plan({"blocks.*.up": "columnwise"}))
    assert "'columnwise' is not a style" in words
    assert "colwise" in words
    words = refusal(Lit(), TensorParallelStrategy(tp_plan={"model.head": "colwise"}))
    assert "two plans for one module" in words
    words = refusal(with_plan({"norm": "colwise"}))
    assert "model.norm is a LayerNorm; tensor-parallel styles cut linears and embeddings" in words
    words = refusal(with_plan({"blocks.*.up": "replicate"}))
    assert "cannot be cut" in words
    words = refusal(with_plan({**PLAN, "head": "rowwise"}))
    assert "model.words.weight" in words
    assert "model.head.weight" in words
    assert "same parameter" in words


class Unknown(nn.Module):
    """A network of blocks that no table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"wide": nn.Linear(16, 40), "narrow": nn.Linear(40, 16)}) for _ in range(2)]
        )
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = x + layer["narrow"](F.gelu(layer["wide"](x)))  # type: ignore[index]
        logits: Tensor = self.head(x)
        return logits


class LitUnknown(Lit):
    """It says nothing either."""

    def __init__(self, plan: Mapping[str, str] | None = None) -> None:
        super().__init__("hand_written")
        torch.manual_seed(3)
        self.model = Unknown().double()
        self.tp_plan = None if plan is None else dict(plan)


@ranks(2, 4)
def test_a_model_without_a_plan_is_told_one_that_works() -> None:
    words = refusal(LitUnknown())
    assert "LitUnknown cannot be cut for tensor parallelism" in words
    assert "model.layers.0.wide (40, 16)" in words
    plan = ast.literal_eval(re.search(r"tp_plan=(\{.*\})", words, re.DOTALL).group(1))  # type: ignore[union-attr]
    assert plan == {"model.layers.*.wide": "colwise", "model.layers.*.narrow": "rowwise"}
    ours, module, _, alone = fit_both(LitUnknown, TensorParallelStrategy(tp_plan=plan), max_epochs=1)
    assert sum(cut_of(p) is not None for p in module.parameters()) == 6
    assert_same(ours, module, alone)


class SharedWeight(Unknown):
    """One weight, used by a layer that widens and by one that, turned, would be cut otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(16, 16, bias=False)
        self.again = nn.Linear(16, 16, bias=False)
        self.again.weight = self.square.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.square(self.words(input_ids))))
        logits: Tensor = self.head(x)
        return logits


@ranks(2)
def test_a_weight_shared_by_modules_that_are_cut_differently() -> None:
    module = LitUnknown({"model.square": "colwise", "model.again": "rowwise"})
    module.model = SharedWeight().double()
    words = refusal(module)
    assert "model.square.weight and model.again.weight are the same parameter but would be cut differently" in words
    assert '"replicate"' in words


@ranks(4)
def test_sizes_of_the_world() -> None:
    words = refusal(Lit(), TensorParallelStrategy(tp=3))
    assert "tp=3 does not divide the 4 ranks of this run; use tp=1, 2, 4" in words
    words = refusal(Lit(), TensorParallelStrategy(tp=8))
    assert "tp=8 does not divide the 4 ranks" in words
    for tp in (0, -2, 2.0, "2", True):
        with pytest.raises(ConfigurationError, match="is not a number of ranks"):
            TensorParallelStrategy(tp=tp)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"takes no stage; its arguments are tp, .*on_uneven, .*timeout"):
        TensorParallelStrategy(stage=3)


@ranks(2)
def test_a_warning_where_tp_is_larger_than_a_node() -> None:
    """Two nodes of one device each, as far as the strategy is told."""
    strategy = TensorParallelStrategy(tp=2)
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.num_nodes = 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layout = strategy.layout
    assert (layout.dp, layout.tp) == (1, 2)
    told = [str(w.message) for w in caught]
    assert len(told) == (1 if strategy.global_rank == 0 else 0)
    assert all("tp=2 is larger than a node (1 devices)" in words and "within a node" in words for words in told)


# Agreement ------------------------------------------------------------------------------------------------------


@ranks(2, 4)
@pytest.mark.parametrize("loop", ["training", "validation", "testing", "prediction"])
def test_peers_with_different_batches(loop: str) -> None:
    strategy = TensorParallelStrategy(tp=2)
    trainer = trainer_on_ranks(strategy, max_epochs=1, use_distributed_sampler=False)
    module = Lit()
    different = texts(16, 4, replicas=world_size(), replica=rank())
    calls = {"training": "fit", "validation": "validate", "testing": "test", "prediction": "predict"}
    with pytest.raises(RankMismatchError) as error:
        getattr(trainer, calls[loop])(module, different)
    words = str(error.value)
    assert f"got different batches in {loop}" in words
    assert "distributed_sampler_kwargs" in words
    assert "seed_everything" in words


@ranks(4)
def test_one_replica_with_different_batches_stops_all() -> None:
    """Ranks 0 and 1 agree, 2 and 3 do not: all four are told."""
    trainer = trainer_on_ranks(TensorParallelStrategy(tp=2), max_epochs=1, use_distributed_sampler=False)
    with pytest.raises(RankMismatchError, match="got different batches") as error:
        trainer.fit(Lit(), texts(16, 4, replicas=4, replica=max(rank(), 1)))
    assert ("which agree; others do not" in str(error.value)) == (rank() < 2)


class Perturbs(L.Callback):
    """Rank 1's copy of a replicated parameter is off by one bit before step `at` + 1; later others follow."""

    def __init__(self, at: int) -> None:
        self.at = at

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.at and rank() == 1:
            module.model.norm.weight[3] = torch.nextafter(module.model.norm.weight[3], torch.tensor(9.0).double())


@ranks(2, 4)
@pytest.mark.parametrize("every", [1, 2])
def test_a_copy_that_is_off_by_one_bit_is_found(every: int) -> None:
    strategy = TensorParallelStrategy(tp=2, check_replicas_every=every)
    trainer = trainer_on_ranks(strategy, max_epochs=1, callbacks=[Perturbs(2 * every - 1)])
    share = {"replicas": world_size() // 2, "replica": rank() // 2}
    with pytest.raises(RankMismatchError) as error:
        trainer.fit(Lit(), texts(**share))
    assert "model.norm.weight is held in common by ranks [0, 1] of a replica" in str(error.value)
    assert f"after {2 * every} optimizer steps" in str(error.value)


@ranks(2)
def test_copies_are_not_looked_at_unless_asked() -> None:
    strategy = TensorParallelStrategy()
    trainer = trainer_on_ranks(strategy, max_epochs=1, callbacks=[Perturbs(1)])
    trainer.fit(Lit(), texts())
    assert trainer.global_step == 4
    with pytest.raises(RankMismatchError, match="is held in common by ranks"):
        strategy.check_replicas()


class Wider(Lit):
    """Rank 1 builds another model."""

    def __init__(self) -> None:
        super().__init__("hand_written")
        if rank() == 1:
            self.model.blocks[1].up = nn.Linear(16, 48).double()  # type: ignore[union-attr, index]
            self.model.blocks[1].down = nn.Linear(48, 16).double()  # type: ignore[union-attr, index]


@ranks(2)
def test_different_models_are_refused_before_anything_is_sent() -> None:
    words = refusal(Wider())
    assert "The ranks have built different models" in words
    assert "model.blocks.1.up.weight" in words
    assert "[48, 16]" in words


@ranks(2)
def test_plans_that_differ_between_ranks() -> None:
    plan = dict(PLAN)
    if rank() == 1:
        plan.pop("blocks.*.attention.qkv")
    words = refusal(with_plan(plan))
    assert "attention.qkv" in words


# Compiling ------------------------------------------------------------------------------------------------------


def compiled_by_method(module: Lit) -> None:
    module.model.compile(backend="eager")


def wrapped(module: Lit) -> None:
    module.model.blocks[0] = torch.compile(module.model.blocks[0], backend="eager")  # type: ignore[union-attr, index, operator]


@ranks(2)
@pytest.mark.parametrize(("how", "named"), [(compiled_by_method, "model"), (wrapped, "model.blocks.0")])
def test_compiled_modules_are_refused_at_setup(how: Any, named: str) -> None:
    module = Lit("hand_written")
    how(module)
    words = refusal(module)
    assert words.startswith(f"{named} is compiled")
    assert "Leave torch.compile and .compile() out" in words


class CompilesLater(Lit):
    """What a layer of cut weights computes goes into a compiled function, or the layer is compiled after setup."""

    compiles = "function"

    def training_step(self, batch: Any, index: int) -> Tensor:
        up = self.model.blocks[0].up  # type: ignore[union-attr, index]
        x = torch.zeros(2, up.in_features, dtype=torch.float64)
        if self.compiles == "module":
            up.compile(backend="eager")
            return up(x).sum()
        return torch.compile(torch.tanh, backend="eager")(up(x)).sum()


@ranks(2)
@pytest.mark.parametrize("compiles", ["function", "module"])
def test_compiling_later_is_refused(compiles: str) -> None:
    module = CompilesLater("hand_written")
    module.compiles = compiles
    trainer = trainer_on_ranks(TensorParallelStrategy(), max_steps=1)
    with pytest.raises(Exception, match="cannot trace tensors of which each rank holds a part"):
        trainer.fit(module, texts())


@ranks(2)
def test_the_random_stream_is_shared_at_setup() -> None:
    """Peers that were seeded differently draw alike from setup on."""
    drawn: list[float] = []

    class Draws(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            drawn.append(float(torch.rand(())))

    torch.manual_seed(50 + rank())
    strategy = TensorParallelStrategy()
    module = Lit()
    torch.manual_seed(50 + rank())
    trainer = trainer_on_ranks(strategy, max_epochs=1, callbacks=[Draws()])
    trainer.fit(module, texts())
    assert len(set(map(tuple, strategy.mesh.rollcall.exchange(drawn)))) == 1  # type: ignore[arg-type]
    assert len(drawn) == 4


def test_the_sizes_that_these_tests_speak_of() -> None:
    assert (VOCAB, TOKENS) == (37, 8)
