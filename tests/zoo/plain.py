"""Models in plain torch, one for each habit of real code that a sharding engine has to survive."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import DTYPE, Batch, Case, classify, generator, images, predict_tokens, tokens, vectors

VOCABULARY = 50
LENGTH = 7
HIDDEN = 16
FEATURES = 6
CLASSES = 5


class Mlp(nn.Module):
    """Two linear layers with a residual connection around them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(torch.tanh(self.up(x)))
        return x + change


class EncoderModel(nn.Module):
    """torch's own encoder between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, nhead=2, dim_feedforward=36, dropout=0.0, batch_first=True)
        layer.self_attn.register_parameter("in_proj_bias", None)  # softmax does not see the key's part of it
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(input_ids)))
        return logits


def make_transformer_encoder() -> nn.Module:
    return EncoderModel().to(DTYPE)


def make_conv_batchnorm() -> nn.Module:
    """No bias before a norm that subtracts it again: its gradient would be rounding noise."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    ).to(DTYPE)


class SharedTwice(nn.Module):
    """One block under two names, run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, HIDDEN)
        self.first = Mlp(HIDDEN, 36)
        self.again = self.first
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.again(torch.relu(self.first(self.stem(x)))))
        return logits


def make_shared_module_twice() -> nn.Module:
    return SharedTwice().to(DTYPE)


class PartlyUnused(nn.Module):
    """A parameter and a submodule that no forward ever touches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, HIDDEN)
        self.block = Mlp(HIDDEN, 36)
        self.forgotten_block = Mlp(HIDDEN, 20)
        self.forgotten_scale = nn.Parameter(torch.ones(HIDDEN))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.stem(x)))
        return logits


def make_unused() -> nn.Module:
    return PartlyUnused().to(DTYPE)


class OddShapes(nn.Module):
    """Parameters with fewer elements than there are ranks, one of them without any dimension; odd buffers."""

    steps: Tensor
    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.gain = nn.Parameter(torch.full((1,), 1.3))
        self.offset = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.randn(5))
        self.readout = nn.Linear(5, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("window", torch.linspace(0.5, 1.5, 5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        hidden = torch.tanh(self.readout(x * self.scale * self.window)) + self.offset
        return hidden * self.gain / self.temperature


def make_odd() -> nn.Module:
    return OddShapes().to(DTYPE)


class CheckpointedLayer(nn.Module):
    """Recomputes only its inner part in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = Mlp(HIDDEN, 36)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(self.mlp, self.norm(x), use_reentrant=False)
        return x + inner


def make_checkpoint_inside() -> nn.Module:
    layers = [CheckpointedLayer() for _ in range(3)]
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), *layers, nn.Linear(HIDDEN, CLASSES)).to(DTYPE)


def make_mixed_frozen() -> nn.Module:
    """Within one layer the weight rests and the bias learns; another layer rests altogether."""
    first, frozen, last = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)
    first.weight.requires_grad_(False)
    frozen.requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), frozen, nn.Tanh(), Mlp(HIDDEN, 36), last).to(DTYPE)


def make_penalty() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), Mlp(HIDDEN, 36), nn.Linear(HIDDEN, CLASSES)).to(DTYPE)


def penalized_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Weight decay written into the loss: reads every parameter after the forward has ended."""
    squares = [parameter.pow(2).sum() for parameter in model.parameters()]
    return classify(model, batch) + 0.01 * torch.stack(squares).sum()


class DirectRead(nn.Module):
    """Uses a weight of another module without calling that module, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, HIDDEN))
        self.blocks = nn.ModuleList([Mlp(HIDDEN, 36), Mlp(HIDDEN, 36)])

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(hidden, self.embedding.weight)


def make_direct_read() -> nn.Module:
    return DirectRead().to(DTYPE)


class LayerDrop(nn.Module):
    """Leaves a layer out when the first sample of the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, HIDDEN)
        self.layers = nn.ModuleList([Mlp(HIDDEN, 36) for _ in range(3)])
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        hidden = self.stem(x)
        for index, layer in enumerate(self.layers):
            if index == 1 and bool(skip[0]):
                continue
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def make_layerdrop() -> nn.Module:
    return LayerDrop().to(DTYPE)


def flagged_vectors(size: int, seed: int) -> Batch:
    """Sample i is flagged when i has an odd number of binary ones: 0110 1001 ...

    So the first samples of 2 or 4 equal parts never carry the same flag all of them, for any power of two of
    samples in a part.
    """
    draw = generator(seed)
    return {
        "x": torch.randn(size, FEATURES, generator=draw, dtype=DTYPE, device="cpu"),
        "labels": torch.randint(CLASSES, (size,), generator=draw, device="cpu"),
        "skip": torch.tensor([index.bit_count() % 2 == 1 for index in range(size)], device="cpu"),
    }


def layerdrop_loss(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(batch, dict)
    return F.cross_entropy(model(batch["x"], batch["skip"]), batch["labels"])


_TOKENS = tokens(VOCABULARY, LENGTH)
_VECTORS = vectors(FEATURES, CLASSES)

CASES = (
    Case("transformer_encoder", make_transformer_encoder, _TOKENS, predict_tokens),
    Case(
        "conv_batchnorm",
        make_conv_batchnorm,
        images(8, CLASSES),
        classify,
        equals_big_batch=False,  # each rank normalises by its own samples: equal to DDP, not to one process
        changes_buffers=True,
    ),
    Case("shared_module_twice", make_shared_module_twice, _VECTORS, classify),
    Case("unused", make_unused, _VECTORS, classify),
    Case("odd", make_odd, vectors(5, 3), classify, changes_buffers=True),
    Case("checkpoint_inside", make_checkpoint_inside, _VECTORS, classify),
    Case("mixed_frozen", make_mixed_frozen, _VECTORS, classify),
    Case("penalty", make_penalty, _VECTORS, penalized_loss, reads_parameters_outside_forward=True),
    Case("direct_read", make_direct_read, _TOKENS, predict_tokens),
    Case(
        "layerdrop",
        make_layerdrop,
        flagged_vectors,
        layerdrop_loss,
        equals_big_batch=False,  # the first sample of a part decides for all of it
        same_path_on_all_ranks=False,
    ),
)
