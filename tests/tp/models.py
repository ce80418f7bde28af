"""Models as people bring them, small and in float64: name -> (module, batches, loss, plan of the user).

Sizes are chosen so that 2 and 4 ranks meet the interesting cases: 4 heads, 2 key-value heads (fewer than 4 ranks), a
vocabulary that no rank number divides, 8 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

VOCAB, TOKENS, SAMPLES = 37, 8, 4
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
DECODER = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 4}


class AllInFloat64(TorchFunctionMode):
    """Models cast to float32 inside (norms, softmax, rotary tables), whose rounding would hide what parity is about."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wide = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


@dataclass(frozen=True)
class Case:
    """A model and how it is trained; `plan` only where the model needs one from the user."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    data: Callable[[torch.Generator], dict[str, Tensor]]
    plan: Mapping[str, str] | None = None

    def build(self) -> nn.Module:
        """The module, the same whenever it is called."""
        torch.manual_seed(11)
        return self.make().double()

    def batch(self, step: int = 0) -> dict[str, Tensor]:
        """The global batch of a step."""
        return self.data(torch.Generator().manual_seed(100 + step))


def text(generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens and labels; the first tokens of a sample are not learned."""
    ids = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}


def pictures(generator: torch.Generator) -> dict[str, Tensor]:
    """Small pictures and classes."""
    pixels = torch.randn(SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (SAMPLES,), generator=generator)}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What the model computes from `labels`."""
    loss: Tensor = model(**batch).loss
    return loss


def hf(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A Hugging Face model of this configuration."""

    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
        return made

    return make


def with_lora(tied: bool = False, **options: Any) -> nn.Module:
    """Adapters on all linears of a Llama."""
    import peft

    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=8, lora_dropout=0.0, target_modules=targets, **options)
    plain = hf("LlamaForCausalLM", "LlamaConfig", **DECODER, tie_word_embeddings=tied)()
    model = peft.get_peft_model(plain, config)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros, with which A would get no gradient
                parameter.normal_(std=0.3)
    return model


class Attention(nn.Module):
    """As in many repositories: one fused projection, sizes from the whole width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q, k, v = self.qkv(x).split(self.width, dim=2)
        q, k, v = (t.view(b, s, self.heads, c // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / (c // self.heads) ** 0.5
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        out = F.softmax(scores, dim=-1) @ v
        joined: Tensor = self.proj(out.transpose(1, 2).contiguous().view(b, s, c))
        return joined


class GPTBlock(nn.Module):
    """Pre-norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class HandWrittenGPT(nn.Module):
    """A language model that no library knows, with tied words."""

    PLAN: Mapping[str, str] = {
        "words": "embedding_rowwise",
        "head": "colwise",
        "blocks.*.attention.qkv": "qkv_colwise",
        "blocks.*.attention.proj": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, 16), nn.Embedding(TOKENS, 16)
        self.blocks = nn.ModuleList([GPTBlock(16, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As in many repositories."""
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1), ignore_index=-100)


class Encoder(nn.Module):
    """`nn.TransformerEncoder` over embedded tokens, with a mask of padding, batch first or not."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.words = nn.Embedding(VOCAB, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.layers(x, src_key_padding_mask=input_ids == 0)
        x = x if self.batch_first else x.transpose(0, 1)
        logits: Tensor = self.head(x)
        return logits


class Decoder(nn.Module):
    """`nn.TransformerDecoder`: attention to its own past and to a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, 16)
        self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=x.dtype)
        logits: Tensor = self.head(self.layers(x, x.flip(1) * 0.5, tgt_mask=mask, tgt_is_causal=True))
        return logits


class AttentionWeights(nn.Module):
    """Reads the weights of the attention, averaged over the heads, in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True, kdim=8, vdim=8)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        out, weights = self.attention(x, x[..., :8], x[..., 8:])
        logits: Tensor = self.head(out) * (1 + weights.square().mean())
        return logits


CASES: dict[str, Case] = {
    "llama": Case(hf("LlamaForCausalLM", "LlamaConfig", **DECODER), own_loss, text),
    "llama_tied": Case(hf("LlamaForCausalLM", "LlamaConfig", **DECODER, tie_word_embeddings=True), own_loss, text),
    "llama_eager": Case(hf("LlamaForCausalLM", "LlamaConfig", **DECODER, attn_implementation="eager"), own_loss, text),
    "qwen2": Case(hf("Qwen2ForCausalLM", "Qwen2Config", **DECODER), own_loss, text),
    "qwen3": Case(hf("Qwen3ForCausalLM", "Qwen3Config", **DECODER), own_loss, text),
    "gemma2": Case(
        hf("Gemma2ForCausalLM", "Gemma2Config", **DECODER, query_pre_attn_scalar=4, sliding_window=4), own_loss, text
    ),
    "mixtral": Case(
        hf(
            "MixtralForCausalLM",
            "MixtralConfig",
            **DECODER,
            num_local_experts=4,
            output_router_logits=True,
            experts_implementation="eager",
        ),
        own_loss,
        text,
    ),
    "phi3": Case(
        hf("Phi3ForCausalLM", "Phi3Config", **DECODER | {"num_key_value_heads": 4}, pad_token_id=0), own_loss, text
    ),
    "gpt_neox": Case(
        hf("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES, intermediate_size=24, hidden_dropout=0.0), own_loss, text
    ),
    "gpt2": Case(
        hf(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCAB,
            n_embd=16,
            n_layer=2,
            n_head=4,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        own_loss,
        text,
    ),
    "opt": Case(
        hf("OPTForCausalLM", "OPTConfig", **SIZES, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0), own_loss, text
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
            intermediate_size=24,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        own_loss,
        text,
    ),
    "vit": Case(
        hf(
            "ViTForImageClassification",
            "ViTConfig",
            **{k: v for k, v in SIZES.items() if k != "vocab_size"},
            intermediate_size=24,
            image_size=8,
            patch_size=2,
            num_labels=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        own_loss,
        pictures,
    ),
    "lora": Case(with_lora, own_loss, text),
    "lora_new_words": Case(lambda: with_lora(modules_to_save=["embed_tokens", "lm_head"]), own_loss, text),
    "lora_some_words": Case(lambda: with_lora(tied=True, trainable_token_indices=[1, 5, 20]), own_loss, text),
    "hand_written": Case(HandWrittenGPT, next_token_loss, text, HandWrittenGPT.PLAN),
    "encoder": Case(lambda: Encoder(batch_first=True), next_token_loss, text),
    "encoder_length_first": Case(lambda: Encoder(batch_first=False), next_token_loss, text),
    "decoder": Case(Decoder, next_token_loss, text),
    "attention_weights": Case(AttentionWeights, next_token_loss, text),
}
