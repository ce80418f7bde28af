"""Models of eight layers as people bring them, in float64: enough layers for four ranks with two stages each.

Lengths change with every step, so that shapes do too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.tp.models import (
    VOCAB,
    Case,
    GPTBlock,
    hf,
    next_token_loss,
    own_loss,
)

LAYERS, SAMPLES = 8, 8
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
DECODER: dict[str, Any] = {
    **SIZES,
    "vocab_size": VOCAB,
    "intermediate_size": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "head_dim": 4,
}


def text(generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens and labels of a length that changes; the first tokens of a sample are not learned."""
    tokens = 5 + int(torch.randint(0, 3, (), generator=generator))
    ids = torch.randint(0, VOCAB, (SAMPLES, tokens), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}


def padded_text(generator: torch.Generator) -> dict[str, Tensor]:
    """With a mask of padding on the left, the same for every sample in number."""
    batch = text(generator)
    mask = torch.ones_like(batch["input_ids"])
    mask[::2, 0] = 0
    return batch | {"attention_mask": mask}


def pictures(generator: torch.Generator) -> dict[str, Tensor]:
    """Small pictures and classes."""
    pixels = torch.randn(SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (SAMPLES,), generator=generator)}


def points(generator: torch.Generator) -> dict[str, Tensor]:
    """Inputs and targets of a regression."""
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return {"x": inputs, "y": inputs.sum(1, keepdim=True).sin()}


def squared_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of a regression."""
    return F.mse_loss(model(batch["x"]), batch["y"])


def perceptron() -> nn.Module:
    """An `nn.Sequential` of unlike parts."""
    return nn.Sequential(
        *(part for _ in range(7) for part in (nn.Linear(6, 6), nn.Tanh())), nn.LayerNorm(6), nn.Linear(6, 1)
    )


class HandWrittenGPT(nn.Module):
    """A language model that no library knows: tied words, a table of positions of its own, a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, 16)
        self.places = nn.Parameter(torch.randn(1, 8, 16) * 0.1)
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList([GPTBlock(16, 4) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places[:, : input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)) * self.scale
        return logits


class Encoder(nn.Module):
    """`nn.TransformerEncoder` over embedded tokens, with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.words(input_ids), src_key_padding_mask=input_ids == 0))
        return logits


class Decoder(nn.Module):
    """`nn.TransformerDecoder`: every layer reads a memory, which is computed before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.memory = nn.Embedding(VOCAB, 16), nn.Linear(16, 16)
        layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, LAYERS)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=x.dtype)
        logits: Tensor = self.head(self.layers(x, self.memory(x.flip(1)), tgt_mask=mask, tgt_is_causal=True))
        return logits


class SharedTable(nn.Module):
    """Every layer reads one table of its own model: a parameter that all stages hold."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, 16)
        table = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), table, nn.Tanh()) for _ in range(LAYERS)])
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


def no_dropout(*names: str) -> Mapping[str, float]:
    """Rates of a configuration that are to be 0."""
    return dict.fromkeys(names, 0.0)


CASES: dict[str, Case] = {
    "llama": Case(hf("LlamaForCausalLM", "LlamaConfig", **DECODER), own_loss, padded_text),
    "llama_tied": Case(hf("LlamaForCausalLM", "LlamaConfig", **DECODER, tie_word_embeddings=True), own_loss, text),
    "qwen2": Case(hf("Qwen2ForCausalLM", "Qwen2Config", **DECODER), own_loss, text),
    "gemma2": Case(
        hf("Gemma2ForCausalLM", "Gemma2Config", **DECODER, query_pre_attn_scalar=4, sliding_window=4), own_loss, text
    ),
    "mixtral": Case(
        hf(
            "MixtralForCausalLM",
            "MixtralConfig",
            **DECODER,
            num_local_experts=4,
            experts_implementation="eager",
        ),
        own_loss,
        text,
    ),
    "gpt2": Case(
        hf(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCAB,
            n_embd=16,
            n_layer=LAYERS,
            n_head=4,
            n_positions=32,
            **no_dropout("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        ),
        own_loss,
        text,
    ),
    "t5": Case(
        hf(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCAB,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_decoder_layers=LAYERS,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        own_loss,
        text,
    ),
    "bert": Case(
        hf(
            "BertForMaskedLM",
            "BertConfig",
            **SIZES,
            vocab_size=VOCAB,
            intermediate_size=24,
            **no_dropout("hidden_dropout_prob", "attention_probs_dropout_prob"),
        ),
        own_loss,
        padded_text,
    ),
    "vit": Case(
        hf(
            "ViTForImageClassification",
            "ViTConfig",
            **SIZES,
            intermediate_size=24,
            image_size=8,
            patch_size=2,
            num_labels=5,
            **no_dropout("hidden_dropout_prob", "attention_probs_dropout_prob"),
        ),
        own_loss,
        pictures,
    ),
    "hand_written": Case(HandWrittenGPT, next_token_loss, text),
    "encoder": Case(Encoder, next_token_loss, text),
    "decoder": Case(Decoder, next_token_loss, text),
    "shared_table": Case(SharedTable, next_token_loss, text),
    "perceptron": Case(perceptron, squared_error, points),
}
