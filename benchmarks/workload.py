"""The work that every system gets: the same Llama, initial weights and tokens, in the same order.

A difference of two step times means something only if both systems did the same arithmetic. So the model is
drawn from a fixed seed on every rank, and the global batch of step i is a function of (seed, i) alone; rank r
takes its rows [r*b, (r+1)*b). Losses of all systems can then be compared step by step.

Tokens follow Zipf's law, p(t) ~ 1 / (t + 10): a model learns the frequencies within a few steps, so the loss
falls and a system that updates its weights wrongly is seen. With uniform tokens the loss would stay flat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class ModelSize:
    """A Llama without tied weights and with as many key/value heads as query heads."""

    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    head_dim: int = 64

    @property
    def num_parameters(self) -> int:
        attention_and_mlp = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate
        norms = 2 * self.hidden
        embedding_and_head = 2 * self.vocabulary * self.hidden
        return self.layers * (attention_and_mlp + norms) + self.hidden + embedding_and_head

    @property
    def largest_parameter(self) -> int:
        return max(self.vocabulary * self.hidden, self.intermediate * self.hidden)

    @property
    def layer_parameters(self) -> int:
        return 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden

    def activation_bytes(self, tokens: int) -> int:
        """A generous guess of what a forward pass in fp32 keeps for backward, for planning memory only."""
        per_layer = 14 * self.hidden + 4 * self.intermediate
        return 4 * tokens * (self.layers * per_layer + 4 * self.vocabulary)


MODEL_SIZES: dict[str, ModelSize] = {
    "10m": ModelSize(hidden=256, layers=6, intermediate=768, vocabulary=8192),
    "60m": ModelSize(hidden=512, layers=16, intermediate=1408, vocabulary=8192),
    "125m": ModelSize(hidden=768, layers=12, intermediate=2048, vocabulary=26000),
    "200m": ModelSize(hidden=1024, layers=12, intermediate=2816, vocabulary=24000),
    "350m": ModelSize(hidden=1024, layers=24, intermediate=2816, vocabulary=22000),
}


@dataclass(frozen=True)
class Job:
    """Everything that decides the arithmetic of a run; equal for all systems in it."""

    size: ModelSize
    precision: str  # "fp32" | "bf16-mixed"
    world_size: int
    global_batch: int
    sequence: int
    seed: int
    learning_rate: float
    deepspeed_buckets: str  # "fit" | "default"

    @property
    def micro_batch(self) -> int:
        return self.global_batch // self.world_size

    @property
    def parameter_bytes(self) -> int:
        """Psi in bytes of fp32, the unit in which traffic is reported (also under bf16-mixed)."""
        return 4 * self.size.num_parameters

    @property
    def activation_bytes(self) -> int:
        return self.size.activation_bytes(self.micro_batch * self.sequence)


def build_model(job: Job) -> LlamaForCausalLM:
    """The same initial weights in every process."""
    import torch
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    heads = job.size.hidden // job.size.head_dim
    config = LlamaConfig(
        hidden_size=job.size.hidden,
        intermediate_size=job.size.intermediate,
        num_hidden_layers=job.size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=job.size.vocabulary,
        max_position_embeddings=max(2048, job.sequence),
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(job.seed)
    model = LlamaForCausalLM(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    if counted != job.size.num_parameters:
        raise RuntimeError(f"the model has {counted} parameters, the plan said {job.size.num_parameters}")
    model.train()
    return model


class TokenStream:
    """The rank's rows (with None all rows) of the global batch of each step, a pure function of (seed, step)."""

    def __init__(self, job: Job, rank: int | None) -> None:
        import torch

        self._job = job
        self._rows = slice(None) if rank is None else slice(rank * job.micro_batch, (rank + 1) * job.micro_batch)
        self._weights: torch.Tensor = 1.0 / (torch.arange(job.size.vocabulary, dtype=torch.float64) + 10.0)

    def batch(self, step: int) -> Tensor:
        """Token ids of shape (micro_batch, sequence)."""
        import torch

        generator = torch.Generator().manual_seed(self._job.seed * 1_000_003 + step)
        count = self._job.global_batch * self._job.sequence
        tokens = torch.multinomial(self._weights, count, replacement=True, generator=generator)
        return tokens.view(self._job.global_batch, self._job.sequence)[self._rows].contiguous()
