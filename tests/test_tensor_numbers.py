"""Traffic and activation memory of tensor parallelism as numbers: the papers' closed forms, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist.comm import Mesh
from lightning_dist.comm.collectives import Pending
from lightning_dist.comm.mesh import Axis
from lightning_dist.core.layout import Layout
from lightning_dist.params.questions import without_answers
from lightning_dist.tensor import cut_module
from lightning_dist.tensor.split_tensor import SplitTensor
from tests.harness import ranks, world_size
from tests.tp.models import CASES, DECODER, SAMPLES, TOKENS, hf, own_loss, text

ITEM = 4  # float32


def cut(module: nn.Module, **options: Any) -> Mesh:
    mesh = Mesh.from_world(Layout(tp=world_size()))
    cut_module(module, mesh.tp, **options)
    return mesh


@ranks(2, 4)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_bytes_of_a_layer_equal_the_paper(sequence_parallel: bool, kv_heads: int) -> None:
    """4 all-reduces of (b, s, h) per layer, 2 forward and 2 backward; with sequence parallelism the same bytes.

    Fewer key-value heads than ranks: keys and values are computed by all, and their gradients gathered once each.
    """
    sent: dict[int, int] = {}
    forward: dict[int, int] = {}
    again: dict[int, int] = {}
    for layers in (1, 3):
        torch.manual_seed(0)
        module = hf(
            "LlamaForCausalLM",
            "LlamaConfig",
            **{**DECODER, "num_hidden_layers": layers, "num_key_value_heads": kv_heads},
        )()
        mesh = cut(module, sequence_parallel=sequence_parallel)
        batch = text(torch.Generator().manual_seed(1))
        with mesh.ledger.measure() as ledger:
            loss = own_loss(module, batch)
        forward[layers] = ledger.total(purpose="activations")
        with mesh.ledger.measure() as backward:
            loss.backward()
        sent[layers] = forward[layers] + backward.total(purpose="activations")
        again[layers] = backward.total(purpose="regathered input")
    n = world_size()
    few = kv_heads < n
    all_reduce = 2 * (n - 1) * SAMPLES * TOKENS * DECODER["hidden_size"] // n * ITEM
    assert (forward[3] - forward[1]) // 2 == 2 * all_reduce + (all_reduce // 2 if few and sequence_parallel else 0)
    if few:
        extra = all_reduce + (all_reduce // 2 if sequence_parallel else 0)
        assert (sent[3] - sent[1]) // 2 == 4 * all_reduce + extra
        return
    assert (sent[3] - sent[1]) // 2 == 4 * all_reduce
    assert sent[1] == 4 * all_reduce + 2 * all_reduce  # and one for the embedding, one for the head
    # Keeping a part of the two inputs of a layer in place of the whole costs one all-gather each in backward.
    assert (again[3] - again[1]) // 2 == (2 * all_reduce // 2 if sequence_parallel else 0)


class Block(nn.Module):
    """The transformer layer that the formula of Korthikanti et al. is about: dropout and scores included."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        y = self.norm1(x)
        q, k, v = (
            layer(y).view(b, s, self.heads, h // self.heads).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        weights = F.dropout((q @ k.transpose(2, 3) / 2.0).softmax(-1), 0.1)
        y = self.proj((weights @ v).transpose(1, 2).reshape(b, s, h))
        x = x + F.dropout(y, 0.1)
        z: Tensor = x + F.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))), 0.1)
        return z


PLAN = dict.fromkeys(("q", "k", "v", "fc1"), "colwise") | dict.fromkeys(("proj", "fc2"), "rowwise")


@contextmanager
def saved_bytes(module: nn.Module) -> Iterator[list[int]]:
    """Bytes that autograd keeps inside the block, every storage once, parameters apart."""
    known = {without_answers(p).untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, Tensor] = {}
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        tensor = without_answers(tensor) if isinstance(tensor, SplitTensor) else tensor
        place = tensor.untyped_storage().data_ptr()
        if place not in known and place not in kept:
            kept[place] = tensor.detach()
            total[0] += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


@ranks(2, 4)
def test_activations_of_a_layer_equal_the_paper() -> None:
    """Korthikanti et al. 2022, table 2, in elements (masks are numbers on the CPU):

    one process ``sbh (18 + 3as/h)``, tensor parallel ``sbh (6 + 12/t + 3as/(ht))``, with sequence parallelism
    ``sbh/t (18 + 3as/h)``. (In bytes of bf16 with masks of one byte: 34 + 5as/h, 10 + 24/t + 5as/(ht), ...)
    Beside it the two norms keep two numbers per token.
    """
    b, s, h, a, t = 2, 8, 32, 4, world_size()
    torch.manual_seed(0)
    inputs = torch.randn(b, s, h)
    tokens, scores = s * b * h, s * b * h * 3 * a * s // h
    statistics = 2 * 2 * b * s
    expected = {
        "one process": tokens * 18 + scores + statistics,
        "plain": tokens * 6 + (tokens * 12 + scores) // t + statistics,
        "sequence": (tokens * 18 + scores + statistics) // t,
    }
    measured = {}
    for kind in expected:
        module = nn.ModuleDict({"block": Block(h, a)})
        x = inputs.clone().requires_grad_()
        if kind != "one process":
            mesh = cut(module, plan={f"block.{k}": v for k, v in PLAN.items()}, sequence_parallel=kind == "sequence")
            if kind == "sequence":  # what an embedding or a layer before this one hands over
                from lightning_dist.core.split import even_split
                from lightning_dist.tensor.split_tensor import Lie, split_tensor

                lie = Lie(mesh.tp, 1, even_split(s, t))
                x = split_tensor(x.detach()[:, lie.split.start(mesh.rank) :][:, : s // t].clone().requires_grad_(), lie)
        with saved_bytes(module) as total:
            module["block"](x)
        measured[kind] = total[0]
    assert measured == {kind: ITEM * elements for kind, elements in expected.items()}


class Largest(TorchDispatchMode):
    """The largest tensor of numbers that any operation makes (shared memory is mapped as bytes)."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        sizes = [tensor.numel() for tensor in tensors if tensor.is_floating_point()]
        self.numel = max([self.numel, *sizes])
        return out


@ranks(2, 4)
@pytest.mark.parametrize("labels", [True, False], ids=["labels", "own loss"])
def test_whole_logits_never_exist(labels: bool) -> None:
    """Forward and backward of the loss make no tensor of tokens x vocabulary, only of this rank's part of it."""
    vocabulary = 403
    torch.manual_seed(0)
    module = hf("LlamaForCausalLM", "LlamaConfig", **{**DECODER, "vocab_size": vocabulary})()
    cut(module)
    ids = torch.randint(0, vocabulary, (SAMPLES, TOKENS))
    with Largest() as largest:
        if labels:
            loss = module(input_ids=ids, labels=ids).loss
        else:
            logits = module(input_ids=ids).logits.float()
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, vocabulary), ids[:, 1:].reshape(-1))
        loss.backward()
    part = SAMPLES * TOKENS * -(-vocabulary // world_size())
    assert part * 0.8 <= largest.numel <= part
    assert part < SAMPLES * (TOKENS - 1) * vocabulary


@ranks(2)
def test_logits_used_otherwise_are_whole_and_right() -> None:
    module, reference = CASES["llama"].build(), CASES["llama"].build()
    cut(module)
    ids = CASES["llama"].batch()["input_ids"]
    with torch.no_grad():
        got, want = module(input_ids=ids).logits, reference(input_ids=ids).logits
    assert got.shape == want.shape and isinstance(got, SplitTensor)
    torch.testing.assert_close(got.argmax(-1), want.argmax(-1))
    torch.testing.assert_close(got.max(), want.max(), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.einsum("bsv->bs", got), torch.einsum("bsv->bs", want), rtol=1e-6, atol=1e-6)


@ranks(2)
def test_the_input_gradient_travels_while_weight_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Order of events in the backward of three linears on one input: one send, three products, then the wait."""
    events: list[str] = []

    class Watched(Pending):
        def wait(self) -> None:
            events.append("wait")
            super().wait()

    start = Axis.start_all_reduce

    def watched(self: Axis, flat: Tensor, *, purpose: str) -> Pending:
        events.append("send")
        pending = start(self, flat, purpose=purpose)
        return Watched(pending.works, pending.finish)

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                events.append("mm")
            return func(*args, **(kwargs or {}))

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x) * self.v(x)

    module = Three()
    cut(module, plan={"q": "colwise", "k": "colwise", "v": "colwise"})
    x = torch.randn(4, 8, requires_grad=True)
    out = without_answers(module(x)).sum()
    monkeypatch.setattr(Axis, "start_all_reduce", watched)
    with Products():
        out.backward()
    assert events == ["mm"] * 3 + ["send"] + ["mm"] * 3 + ["wait"]


@ranks(2)
def test_smollm2_shapes_fit_three_ways_only_where_they_divide() -> None:
    """9 heads and 3 key-value heads: two ranks are refused with the sizes that work."""
    from lightning_dist.core.errors import ConfigurationError

    sizes = {**DECODER, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
    with pytest.raises(ConfigurationError, match=r"tp=2 does not divide num_attention_heads=9.*use tp=1, 3, 9"):
        cut(hf("LlamaForCausalLM", "LlamaConfig", **sizes)())
