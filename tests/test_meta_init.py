"""Models built on the meta device: every tensor as one process would have drawn it, or a refusal by name."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_dist import ZeROStrategy
from lightning_dist.core.errors import UnsupportedModelError
from lightning_dist.engine import materialize
from tests.harness import rank, ranks
from tests.lit import trainer_on_ranks
from tests.zoo import hf


def plain() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
    return LlamaForCausalLM(
        LlamaConfig(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16))


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


@pytest.mark.parametrize("make", [plain, llama, gpt2])
def test_values_are_those_of_one_process(make: Any) -> None:
    """Same seed, same start. Buffers that no file holds (rotary tables, masks) come out right as well."""
    torch.manual_seed(5)
    want = make()
    with torch.device("meta"):
        module = make()
    torch.manual_seed(5)
    materialize(module)
    got = tensors(module)
    assert got.keys() == tensors(want).keys()
    assert len(tensors(want)) > 5
    for name, value in tensors(want).items():
        assert not got[name].is_meta
        assert torch.equal(got[name], value), name


def test_a_tensor_that_no_one_can_fill_is_refused_by_name() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(4.0), persistent=False)

    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), Table())
    with pytest.raises(UnsupportedModelError, match=r"1 \(Table\).*reset_parameters"):
        materialize(module)


class Late(L.LightningModule):
    """Builds its model in `configure_model`, on meta."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = llama()

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@ranks(2)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_training_from_meta(stage: int) -> None:
    L.seed_everything(3, verbose=False)
    module = Late()
    trainer = trainer_on_ranks(stage, max_steps=2)
    data = torch.utils.data.DataLoader(torch.randint(0, 64, (16, 8)), batch_size=2)
    trainer.fit(module, data)
    strategy = trainer.strategy
    assert isinstance(strategy, ZeROStrategy)
    right = dict(llama().named_buffers())
    buffers = {name.removeprefix("net."): b for name, b in module.named_buffers()}
    assert len(right) > 0
    for name, value in right.items():
        assert torch.equal(buffers[name], value), name
    state = strategy.full_state_dict()
    assert all(v.is_meta == bool(rank()) for v in state.values() if isinstance(v, torch.Tensor))
    if rank() == 0:
        assert torch.equal(state["net.lm_head.weight"], state["net.model.embed_tokens.weight"])
        assert all(bool(torch.isfinite(v).all()) for v in state.values())


def test_the_zoo_knows_the_same_families() -> None:
    assert {"llama", "gpt2"} <= {case.name for case in hf.CASES}


@pytest.mark.parametrize("make", [plain, llama, gpt2])
def test_what_is_not_wanted_is_never_made_and_the_rest_is_the_same(make: Any) -> None:
    torch.manual_seed(5)
    want = dict(make().named_parameters())
    with torch.device("meta"):
        module = make()
    wanted = {parameter for index, parameter in enumerate(module.parameters()) if index % 3}
    names = {name for name, parameter in module.named_parameters() if parameter in wanted}
    torch.manual_seed(5)
    materialize(module, wanted.__contains__)
    after = torch.rand(3)
    torch.manual_seed(5)
    make()
    assert torch.equal(after, torch.rand(3))
    assert len(names) >= 3
    for name, parameter in module.named_parameters():
        assert parameter.is_meta == (name not in names), name
        if name in names:
            assert torch.equal(parameter, want[name]), name
