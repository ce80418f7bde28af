"""Models of the transformers library, a few thousand parameters each.

They compute in float64 throughout. Llama and ViT would not: their norm and their softmax go through float32
whatever the model's dtype, and a rounding there is seven digits coarser than what parity is about. So Llama's norms
are exchanged for torch's (same parameters, same names), and attention is transformers' eager one without the cast.
Key biases are dropped: softmax does not see them, their gradient is rounding noise, and Adam makes steps of noise.

transformers is imported when a model is built, not when the zoo is listed.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.case import DTYPE, Batch, Case, generator, images, token_loss, tokens

VOCABULARY = 50  # not a multiple of 4: flat shards of the embedding end in the middle of a row
LENGTH = 7
CLASSES = 5
IMAGE_SIDE = 8

HEAVY_IMPORTS = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bert.modeling_bert",
    "transformers.models.vit.modeling_vit",
    "transformers.models.albert.modeling_albert",
    "peft",
)
_FLOAT64_EAGER = "float64_eager"


def _float64_attention(
    module: nn.Module,
    query: Tensor,  # (b, heads, s, d)
    key: Tensor,  # (b, kv heads, s, d)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    assert dropout == 0.0
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1)  # (b, heads, s, s), in the dtype of the query
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _transformers() -> Any:
    """The library as a whole; its configurations take more arguments than their signatures say."""
    import transformers

    return transformers


def _float64_eager() -> str:
    """Make the attention above known to transformers and return its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(_FLOAT64_EAGER, _float64_attention)
    AttentionMaskInterface.register(_FLOAT64_EAGER, eager_mask)
    return _FLOAT64_EAGER


def _without_float32_norms(model: nn.Module) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm):
                size, eps = child.weight.numel(), child.variance_epsilon
                setattr(parent, name, nn.RMSNorm(size, eps=eps))
    return model


def _without_key_biases(model: nn.Module) -> nn.Module:
    for name, module in list(model.named_modules()):
        if name.endswith(".key"):
            module.bias = None
        if name.endswith(".attn"):  # of GPT-2, whose bias is one for query, key and value
            module.c_attn = TransposedProjection(module.c_attn.weight)
    return model


class TransposedProjection(nn.Module):
    """GPT-2's way to store a linear layer, (in, out), without the bias."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def make_llama(*, tied: bool = False, layers: int = 2) -> nn.Module:
    """Grouped-query attention: four query heads share two key and value heads."""
    library = _transformers()
    config = library.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=36,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        attention_dropout=0.0,
        use_cache=False,
        attn_implementation=_float64_eager(),
    )
    return _without_float32_norms(library.LlamaForCausalLM(config)).to(DTYPE)


def make_llama_tied() -> nn.Module:
    return make_llama(tied=True)


def _recomputing_llama(use_reentrant: bool) -> nn.Module:
    model: Any = make_llama(layers=3)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    recomputing: nn.Module = model
    return recomputing


def make_llama_recompute() -> nn.Module:
    return _recomputing_llama(use_reentrant=False)


def make_llama_recompute_reentrant() -> nn.Module:
    return _recomputing_llama(use_reentrant=True)


def make_lora() -> nn.Module:
    """Low-rank adapters on queries and values of a frozen Llama; both factors start random, so both learn."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=3, lora_alpha=6, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    base: Any = make_llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is on its way out
        model: nn.Module = get_peft_model(base, adapters)
    return model.to(DTYPE)


def make_gpt2() -> nn.Module:
    """Embedding and head are one parameter."""
    library = _transformers()
    config = library.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=12,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return _without_key_biases(library.GPT2LMHeadModel(config)).to(DTYPE)


def make_bert() -> nn.Module:
    """Masked language model; the decoder is tied to the embedding and has a bias of its own."""
    library = _transformers()
    config = library.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=36,
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
        use_cache=False,
        attn_implementation="eager",
    )
    return _without_key_biases(library.BertForMaskedLM(config)).to(DTYPE)


def make_albert() -> nn.Module:
    """One layer, used four times in every forward."""
    library = _transformers()
    config = library.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=10,
        hidden_size=16,
        num_hidden_layers=4,
        num_hidden_groups=1,
        inner_group_num=1,
        num_attention_heads=2,
        intermediate_size=36,
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        initializer_range=0.2,
        num_labels=CLASSES,
        attn_implementation="eager",
    )
    return _without_key_biases(library.AlbertForSequenceClassification(config)).to(DTYPE)


def make_vit() -> nn.Module:
    library = _transformers()
    config = library.ViTConfig(
        image_size=IMAGE_SIDE,
        patch_size=4,
        num_channels=3,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=36,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
        qkv_bias=False,
        num_labels=CLASSES,
        attn_implementation=_float64_eager(),
    )
    model: nn.Module = library.ViTForImageClassification(config)
    return model.to(DTYPE)


def padded_tokens(size: int, seed: int) -> Batch:
    """Sequences of different lengths, padded at the end, each with the number of a class."""
    draw = generator(seed)
    lengths = torch.randint(3, LENGTH + 1, (size, 1), generator=draw, device="cpu")
    return {
        "input_ids": torch.randint(VOCABULARY, (size, LENGTH), generator=draw, device="cpu"),
        "attention_mask": (torch.arange(LENGTH, device="cpu") < lengths).long(),
        "labels": torch.randint(CLASSES, (size,), generator=draw, device="cpu"),
    }


def causal_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Not the model's own loss, which goes through float32."""
    assert isinstance(batch, dict)
    return token_loss(model(input_ids=batch["input_ids"], use_cache=False).logits, batch["labels"])


def masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(batch, dict)
    return token_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])


def sequence_loss(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(batch, dict)
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return F.cross_entropy(output.logits, batch["labels"])


def picture_loss(model: nn.Module, batch: Batch) -> Tensor:
    pixels, labels = batch
    assert isinstance(labels, Tensor)
    return F.cross_entropy(model(pixel_values=pixels).logits, labels)


_TOKENS = tokens(VOCABULARY, LENGTH)

CASES = (
    Case("llama", make_llama, _TOKENS, causal_loss),
    Case("llama_tied", make_llama_tied, _TOKENS, causal_loss),
    Case("llama_recompute", make_llama_recompute, _TOKENS, causal_loss),
    Case("llama_recompute_reentrant", make_llama_recompute_reentrant, _TOKENS, causal_loss),
    Case("lora", make_lora, _TOKENS, causal_loss),
    Case("gpt2", make_gpt2, _TOKENS, causal_loss),
    Case("bert", make_bert, _TOKENS, masked_loss),
    Case("albert", make_albert, padded_tokens, sequence_loss),
    Case("vit", make_vit, images(IMAGE_SIDE, CLASSES), picture_loss),
)
