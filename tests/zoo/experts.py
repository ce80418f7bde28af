"""Mixtures of experts: the data decides which parameters take part, and the ranks' data differ.

    token --> router --> expert of the highest score, weighted by its probability

An expert without a token is not called at all, so its parameters get no gradient there, while other ranks have one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.case import DTYPE, Batch, Case, generator, predict_tokens

VOCABULARY = 42
LENGTH = 6
HIDDEN = 16
HEADS = 2
EXPERTS = 4


class Expert(nn.Module):
    """A gated MLP as in Llama."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def dispatch(x: Tensor, scores: Tensor, experts: nn.ModuleList) -> Tensor:
    """Send each token to its best expert; x (n, h), scores (n, experts) -> (n, h).

    Experts run in the order in which the tokens ask for them, so not only the number of calls but also their order
    differs between ranks.
    """
    probability, choice = scores.softmax(dim=-1).max(dim=-1)
    out = torch.zeros_like(x)
    for index in dict.fromkeys(choice.tolist()):
        chosen = (choice == index).nonzero().squeeze(1)
        out = out.index_add(0, chosen, experts[index](x[chosen]) * probability[chosen, None])
    return out


class MoeBlock(nn.Module):
    """Causal attention, then the experts, both with a norm before and a residual connection around."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.expert_norm = nn.RMSNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(HIDDEN, 20) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, HIDDEN // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (b, heads, s, d)
        scores = query @ key.transpose(2, 3) / (HIDDEN // HEADS) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ value
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, HIDDEN))
        flat = self.expert_norm(x).flatten(0, 1)  # (b*s, h)
        return x + dispatch(flat, self.router(flat), self.experts).view_as(x)


class MoeLayers(nn.Module):
    """Experts inside the repeated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(MoeBlock() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class MoeToplevel(nn.Module):
    """Experts in the model's own list: to an engine they look like its repeated layers, but not every one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(HIDDEN, 20) for _ in range(EXPERTS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        flat = self.embedding(input_ids).flatten(0, 1)  # (b*s, h)
        flat = flat + dispatch(flat, self.router(flat), self.experts)
        logits: Tensor = self.head(flat).unflatten(0, input_ids.shape)
        return logits


def few_tokens(size: int, seed: int) -> Batch:
    """Each sample repeats two tokens of its own, so a rank's few samples seldom need every expert."""
    draw = generator(seed)
    pairs = torch.randint(VOCABULARY, (size, 2), generator=draw, device="cpu")
    places = torch.randint(2, (size, LENGTH), generator=draw, device="cpu")
    return {
        "input_ids": pairs.gather(1, places),
        "labels": torch.randint(VOCABULARY, (size, LENGTH), generator=draw, device="cpu"),
    }


def make_moe_layers() -> nn.Module:
    return MoeLayers().to(DTYPE)


def make_moe_toplevel() -> nn.Module:
    return MoeToplevel().to(DTYPE)


CASES = (
    Case("moe_layers", make_moe_layers, few_tokens, predict_tokens, same_path_on_all_ranks=False),
    Case("moe_toplevel", make_moe_toplevel, few_tokens, predict_tokens, same_path_on_all_ranks=False),
)
