"""Dropout and activation recompute under tensor parallelism."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dist import TensorParallelStrategy
from tests.harness import rank, ranks, world_size
from tests.lit import trainer_alone, trainer_on_ranks
from tests.tp.lit import Lit, assert_same, texts, whole_weights
from tests.tp.models import DECODER, SIZES, VOCAB, GPTBlock, HandWrittenGPT, hf

RATE = 0.1


class DroppingBlock(GPTBlock):
    """Dropout where nanoGPT has it: on attention weights, inner features, and both residual branches."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q, k, v = self.attention.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (t.view(b, s, 4, c // 4).transpose(1, 2) for t in (q, k, v))
        rate = RATE if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        joined = attended.transpose(1, 2).reshape(b, s, c)
        x = x + F.dropout(self.attention.proj(joined), RATE, self.training)
        inner = F.dropout(F.gelu(self.up(self.norm2(x))), RATE, self.training)
        y: Tensor = x + F.dropout(self.down(inner), RATE, self.training)
        return y


class Dropping(HandWrittenGPT):
    """`recompute`: None, "reentrant" or "saved tensors"."""

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DroppingBlock(16, 4) for _ in range(2)])
        self.recompute = recompute

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        x = F.dropout(x, RATE, self.training)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        logits: Tensor = self.head(self.norm(x))
        return logits


class LitDropping(Lit):
    """A model of this file."""

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__("hand_written", lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        torch.manual_seed(9)
        self.model = Dropping(recompute).double()


LIBRARY = {
    "llama": hf("LlamaForCausalLM", "LlamaConfig", **DECODER, attention_dropout=RATE),
    "gpt2": hf("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=32),
    "bert": hf("BertForMaskedLM", "BertConfig", **SIZES, intermediate_size=24),
}
"""Models of Hugging Face with dropout, which GPT-2 and BERT have everywhere by default."""


class LitLibrary(Lit):
    """One of them."""

    def __init__(self, name: str, recompute: str | None = None) -> None:
        super().__init__(name, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        torch.manual_seed(9)
        model: Any = LIBRARY[name]().double()
        model.train()
        if recompute is not None:
            kind = {"use_reentrant": recompute == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kind)
        self.model = model

    def loss(self, batch: Any) -> Tensor:
        """In the model's own dtypes: recompute happens in backward, where the float64 mode of the table is over."""
        loss: Tensor = self.model(**batch).loss
        return loss


def fitted(module: Lit, strategy: TensorParallelStrategy, **options: Any) -> dict[str, Tensor]:
    trainer = trainer_on_ranks(strategy, max_steps=3, **options)
    torch.manual_seed(77)
    trainer.fit(module, texts())
    assert trainer.global_step == 3
    return whole_weights(trainer, module)


@ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_copies_stay_equal_over_fifty_steps_of_dropout(sequence_parallel: bool) -> None:
    strategy = TensorParallelStrategy(tp=2, sequence_parallel=sequence_parallel, check_replicas_every=1)
    trainer = trainer_on_ranks(strategy, max_steps=50)
    module = LitDropping()
    torch.manual_seed(50 + rank())  # peers must follow one stream nevertheless
    trainer.fit(module, texts(200, 4, replicas=world_size() // 2, replica=rank() // 2))
    assert trainer.global_step == 50
    assert strategy._steps == 50
    strategy.check_replicas()
    assert all(map(math.isfinite, module.losses))
    assert module.losses[-1] < module.losses[0]
    assert len({tuple(said) for said in strategy.mesh.rollcall.exchange(module.losses)}) == world_size() // 2  # type: ignore[arg-type]


@ranks(2)
def test_dropout_drops() -> None:
    """Else the tests of this file would hold for nothing: two runs with other seeds differ."""
    strategy = TensorParallelStrategy()
    trainer = trainer_on_ranks(strategy, max_steps=1)
    module = LitDropping()
    trainer.fit(module, texts())
    losses = set()
    for seed in range(3):
        torch.manual_seed(seed)
        losses.add(float(module.loss(next(iter(texts()))).detach()))
    assert len(losses) == 3
    module.eval()
    with torch.no_grad():
        assert len({float(module.loss(next(iter(texts())))) for _ in range(2)}) == 1


@ranks(2)
def test_evaluation_with_dropout_equals_one_process() -> None:
    ours, theirs = trainer_on_ranks(TensorParallelStrategy()), trainer_alone()
    got = ours.validate(LitDropping(), texts(8), verbose=False)
    want = theirs.validate(LitDropping(), texts(8), verbose=False)
    assert got == [pytest.approx(want[0], rel=1e-9)]


@ranks(2, 4)
@pytest.mark.parametrize("recompute", ["reentrant", "saved tensors"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_recompute_draws_the_same_numbers(recompute: str, sequence_parallel: bool) -> None:
    plain = fitted(LitDropping(), TensorParallelStrategy(sequence_parallel=sequence_parallel))
    again = fitted(
        LitDropping(recompute), TensorParallelStrategy(sequence_parallel=sequence_parallel, check_replicas_every=1)
    )
    for name, value in plain.items():
        torch.testing.assert_close(again[name], value, rtol=1e-10, atol=1e-12, msg=name)


@ranks(2)
@pytest.mark.parametrize("recompute", ["reentrant", "saved tensors"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("name", LIBRARY)
def test_recompute_of_library_models(name: str, recompute: str, sequence_parallel: bool) -> None:
    plain = fitted(LitLibrary(name), TensorParallelStrategy(sequence_parallel=sequence_parallel))
    strategy = TensorParallelStrategy(sequence_parallel=sequence_parallel, check_replicas_every=1)
    module = LitLibrary(name, recompute)
    again = fitted(module, strategy)
    assert getattr(module.model, "is_gradient_checkpointing")  # noqa: B009
    for key, value in plain.items():
        torch.testing.assert_close(again[key], value, rtol=1e-9, atol=1e-11, msg=key)


class Quiet(LitDropping):
    """Recomputed without dropout: equal to one process."""

    def __init__(self, recompute: str) -> None:
        super().__init__(recompute)
        self.model = HandWrittenGPT().double()
        blocks = self.model.blocks
        for block in blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(  # type: ignore[method-assign]
                forward, x, use_reentrant=recompute == "reentrant"
            )


@ranks(2, 4)
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
@pytest.mark.parametrize("recompute", ["reentrant", "saved tensors"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_recompute_equals_one_process(recompute: str, sequence_parallel: bool, precision: str) -> None:
    strategy = TensorParallelStrategy(sequence_parallel=sequence_parallel, check_replicas_every=1)
    module, alone = Quiet(recompute), Quiet(recompute)
    if precision != "64-true":
        module.float()
        alone.float()
    trainer = trainer_on_ranks(strategy, max_steps=3, **({} if precision == "64-true" else {"precision": precision}))
    trainer.fit(module, texts())
    trainer_alone(max_steps=3).fit(alone, texts())
    if precision == "64-true":
        assert_same(trainer, module, alone)
    else:
        assert module.losses == pytest.approx(alone.losses, rel=0.02)


class DrawsOnRankZero(L.Callback):
    """As a callback that logs a random sample does."""

    def on_train_batch_end(self, *_: Any) -> None:
        if rank() == 0:
            torch.randperm(7)


@ranks(2)
@pytest.mark.filterwarnings("ignore:since the last step only some ranks")
def test_random_numbers_drawn_on_one_rank_do_not_part_the_copies() -> None:
    strategy = TensorParallelStrategy(check_replicas_every=1)
    trainer = trainer_on_ranks(strategy, max_epochs=1, callbacks=[DrawsOnRankZero()])
    trainer.fit(LitDropping(), texts())
    strategy.check_replicas()
    states = strategy.mesh.rollcall.exchange(torch.random.get_rng_state().tolist())
    assert trainer.global_step == 4
    assert states[0] != states[1]  # after the last batch rank 0 has drawn once more
