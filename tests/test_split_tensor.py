"""The algebra of `SplitTensor`: every operation gives the values and the gradients of the plain tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lightning_dist.comm import Mesh, pairs
from lightning_dist.core.errors import UnsupportedModelError
from lightning_dist.core.layout import Layout
from lightning_dist.core.split import even_split
from lightning_dist.params.questions import without_answers
from lightning_dist.tensor.draws import local_draws
from lightning_dist.tensor.parameter import cut_in_place
from lightning_dist.tensor.split_tensor import Lie, SplitTensor, split_tensor, whole, whole_shape
from tests.harness import ranks, world_size

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@dataclass(frozen=True)
class T:
    """An operand: its whole shape, and the dim along which it is divided (None: every rank has all of it)."""

    shape: tuple[int, ...]
    dim: int | None = None
    blocks: int | tuple[int, ...] = 1
    unit: int = 1
    kind: str = "float"  # "float", "positive", "bool", or "below 7": integers

    def values(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.kind.startswith("below"):
            return torch.randint(0, int(self.kind.split()[1]), self.shape, generator=generator)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.kind == "bool":
            return x > 0
        return (x.abs() + 0.5 if self.kind == "positive" else x).requires_grad_()


@dataclass(frozen=True)
class Op:
    """A function of operands, and whether its (first) result stays divided; None where that does not matter."""

    call: Callable[..., Any]
    operands: tuple[T, ...]
    stays: bool | None = None


def mesh() -> Mesh:
    return Mesh.from_world(Layout(tp=world_size()))


def divided(x: Tensor, axis: Any, operand: T) -> Tensor:
    if operand.dim is None:
        return x
    dim = operand.dim % x.ndim
    split = even_split(x.shape[dim], axis.size, blocks=operand.blocks, unit=operand.unit)
    return split_tensor(pairs.take(x, axis, dim, split), Lie(axis, dim, split))


def leaves(out: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]


def put_together(x: Tensor) -> Tensor:
    return whole(x) if isinstance(x, SplitTensor) else x


def changed(x: Tensor, how: Callable[[Tensor], object]) -> Tensor:
    """An in-place operation in the middle of a graph, and what stands behind it."""
    y = x * 1.5
    how(y)
    return y * y


def assign(x: Tensor, index: Any, value: Any) -> Tensor:
    def how(y: Tensor) -> None:
        y[index] = value

    return changed(x, how)


def compound(x: Tensor, other: Any, name: str) -> Tensor:
    """``y **= other`` and its like, seen through a second name for y."""
    y = x * 1.5
    z = y
    scope = {"y": y, "other": other}
    exec(f"y {name}= other", scope)
    return torch.as_tensor(z) * 1


def heads(x: Tensor) -> Tensor:
    return x.view(3, 5, 4, 2).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def qkv(x: Tensor, heads: int = 4) -> Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in x.chunk(3, dim=-1))
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def two_columns(y: Tensor) -> None:
    """Each is written after both were taken."""
    a, b = y[..., 0], y.select(-1, 1)
    a.mul_(2.0)
    b.mul_(3.0)
    a.add_(b)


def read_later(y: Tensor) -> None:
    column = y[..., 2]
    y.mul_(2.0)
    y.add_(column.clone().unsqueeze(-1))


def written_to(x: Tensor, out: Tensor) -> Tensor:
    torch.exp(x.detach(), out=out)
    return out * x.sum()


def out_into_a_row(x: Tensor) -> Tensor:
    y = x.detach() * 2
    torch.neg(y[..., 0], out=y[..., 1])
    return y * x


class Reversed(torch.autograd.Function):
    """The reversal of gradients, scaled by their norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0] / grads[0].norm()


class OwnTanh(torch.autograd.Function):
    """What it saves is its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        grown: Tensor = grads[0] * (1 - y * y)
        return grown


class OwnNorm(torch.autograd.Function):
    """A norm over the divided dim with a weight and a factor, whose gradients are sums over it."""

    @staticmethod
    def forward(ctx: Any, power: float, x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
        r = x.pow(power).mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, weight, factor, r)
        return x * r * weight * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, factor, r = ctx.saved_tensors
        grad, n = grads[0] * factor, x.shape[-1]
        inner = grad * weight
        to_x = r * inner - x * r.pow(3) * (inner * x).sum(-1, keepdim=True) / n
        return None, to_x, (grad * x * r).reshape(-1, n).sum(0), (grads[0] * x * r * weight).sum()


class Several(torch.autograd.Function):
    """Outputs that are divided, whole, and divided otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * 2, x.pow(2).sum(), x.mean(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grown: Tensor = grads[0] * 2 + 2 * x * grads[1] + grads[2].expand_as(x) / x.shape[1]
        return grown


LAST, ODD, SEQ, ROWS = T((3, 5, 8), 2), T((3, 5, 7), 2), T((3, 5, 8), 1), T((3, 5, 8), 0)
HEADS = T((3, 4, 5, 2), 1)
FUSED = T((3, 5, 24), 2, blocks=3)
LOGITS, TARGETS = T((6, 7), 1), T((6,), kind="below 7")
CLASSES = T((7,), kind="positive")
MASKED = T((6,), kind="below 7")

OPS: dict[str, Op] = {
    # elementwise
    "neg": Op(lambda x: -x, (ODD,), True),
    "gelu": Op(F.gelu, (ODD,), True),
    "silu_times": Op(lambda x, y: F.silu(x) * y, (ODD, ODD), True),
    "sigmoid_exp": Op(lambda x: torch.sigmoid(x) + x.exp().log1p(), (ODD,), True),
    "clamp": Op(lambda x: x.clamp(-0.5, 0.5), (ODD,), True),
    "clamp_to_tensors": Op(lambda x, y: x.clamp(min=y), (ODD, ODD), True),
    "scalars": Op(lambda x: 2 * x - 1 / (x * x + 1) + x**2, (ODD,), True),
    "plus_whole": Op(lambda x, y: x + y, (ODD, T((3, 5, 7))), True),
    "whole_plus": Op(lambda x, y: y - x, (ODD, T((3, 5, 7))), True),
    "plus_features": Op(lambda x, y: x + y, (ODD, T((7,))), True),
    "plus_one_per_token": Op(lambda x, y: x * y, (ODD, T((5, 1))), True),
    "plus_number_tensor": Op(lambda x, y: x * y, (ODD, T(())), True),
    "more_dims_than_split": Op(lambda x, y: x + y, (T((7,), 0), T((3, 5, 7))), True),
    "split_features_of_whole": Op(lambda x, y: y * x, (T((7,), 0), T((3, 5, 7))), True),
    "split_otherwise": Op(lambda x, y: x * y, (T((3, 6, 8), 2), T((3, 6, 8), 1)), True),
    "split_along_tokens": Op(lambda x, y, z: x * y + z, (SEQ, T((8,)), T((5, 8))), True),
    "outer": Op(lambda x, y: x.unsqueeze(-1) * y, (T((7,), 0), T((3,))), True),
    "broadcast_of_divided": Op(lambda x, y: x.unsqueeze(1) * y.unsqueeze(2), (T((3, 7), 1), T((3, 5))), True),
    "lerp": Op(lambda x, y: torch.lerp(x, y, 0.3), (ODD, ODD), True),
    "addcmul": Op(lambda x, y, z: torch.addcmul(x, y, z, value=0.5), (ODD, ODD, T((7,))), True),
    "where": Op(lambda x, c, y: torch.where(c, x, y), (ODD, T((5, 7), kind="bool"), ODD), True),
    "where_method": Op(lambda x, y: x.where(x > 0, y), (ODD, T(())), True),
    "masked_fill": Op(lambda x, m: x.masked_fill(m, -2.0), (ODD, T((3, 5, 1), kind="bool")), True),
    "comparisons": Op(lambda x, y: ((x > y) | (x <= 0)) & (x != 1), (ODD, ODD), True),
    "isnan": Op(lambda x: torch.isnan(x.sqrt()), (ODD,), True),
    "float_to": Op(lambda x: x.float().to(torch.float64).type_as(x), (ODD,), True),
    "type_as_other_shape": Op(lambda x, y: y.type_as(x) * 2, (ODD, T((1, 5))), None),
    "to_like_other": Op(lambda x, y: y.to(x) * 2, (ODD, T((3, 5, 1))), None),
    "like": Op(lambda x: torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 3), (ODD,), True),
    "new": Op(lambda x: x.new_zeros(3, 7) + x.new_tensor([1.0]), (ODD,), False),
    # shapes
    "view_heads": Op(heads, (LAST,), True),
    "view_and_back": Op(lambda x: heads(x).transpose(1, 2).contiguous().view(3, 5, 8), (LAST,), True),
    "view_of_tokens": Op(lambda x: x.view(-1, 7), (ODD,), True),
    "view_flat": Op(lambda x: x.reshape(-1), (ODD,), True),
    "view_torn": Op(lambda x: x.reshape(3, 5, 2, 4), (T((3, 5, 8), 2),), None),
    "view_merging_divided_first": Op(lambda x: x.reshape(15, 8), (ROWS,), True),
    "view_merging_divided_second": Op(lambda x: x.reshape(15, 8), (SEQ,), True),
    "view_one": Op(lambda x: x.view(3, 1, 5, 1, 7), (ODD,), True),
    "view_into_more": Op(lambda x: x.reshape(6, 4, 5), (T((4, 6, 5), 0),), None),
    "flatten": Op(lambda x: x.flatten(2), (T((3, 5, 7, 2), 2),), True),
    "flatten_ranks_last": Op(lambda x: torch.flatten(x, 1, 2), (HEADS,), True),
    "unflatten": Op(lambda x: x.unflatten(-1, (4, 2)), (T((3, 5, 8), 2, unit=2),), True),
    "unflatten_named": Op(lambda x: x.unflatten(dim=2, sizes=(4, -1)), (T((3, 5, 8), 2, unit=2),), True),
    "permute": Op(lambda x: x.permute(2, 0, 1) * 2, (ODD,), True),
    "permute_torch": Op(lambda x: torch.permute(x, (2, 0, 1)), (ODD,), True),
    "transpose_named": Op(lambda x: x.transpose(dim0=0, dim1=-1), (ODD,), True),
    "mT": Op(lambda x: x.mT, (ODD,), True),
    "T": Op(lambda x: x.T * 2, (T((5, 7), 1),), None),
    "movedim": Op(lambda x: x.movedim(-1, 0), (ODD,), None),
    "expand": Op(lambda x: x.unsqueeze(1).expand(3, 2, 5, 7), (ODD,), True),
    "expand_as": Op(lambda x, y: x.expand_as(y), (T((1, 7), 1), T((4, 7))), None),
    "repeat": Op(lambda x: x.repeat(2, 1, 1), (ODD,), None),
    "squeeze": Op(lambda x: x.unsqueeze(0).squeeze(0).unsqueeze(-2).squeeze(-2), (ODD,), True),
    "squeeze_all": Op(lambda x: x[:1].squeeze(), (ODD,), None),
    "repeat_interleave": Op(lambda x: x.repeat_interleave(2, dim=1).repeat_interleave(3, 0), (HEADS,), True),
    "contiguous_clone": Op(lambda x: x.transpose(0, 1).contiguous().clone(), (ODD,), True),
    "stack": Op(lambda x, y: torch.stack([x, y], 1), (ODD, ODD), None),
    "roll": Op(lambda x: x.roll(1, -1), (ODD,), None),
    "flip": Op(lambda x: x.flip(-1), (ODD,), None),
    # indices
    "slices": Op(lambda x: x[1:, None, ..., 0:4, :], (ODD,), True),
    "number": Op(lambda x: x[:, 2] + x[..., -1, :], (ODD,), True),
    "none_in_front": Op(lambda x: x[None, :, :, :, None], (ODD,), True),
    "number_of_divided": Op(lambda x: x[..., 3], (ODD,), False),
    "slice_of_divided": Op(lambda x: x[..., 1:6], (ODD,), None),
    "step_of_divided": Op(lambda x: x[..., ::2], (ODD,), None),
    "half_rotation": Op(lambda x: torch.cat([-x[..., 1:], x[..., :1]], -1), (HEADS,), True),
    "mask_index": Op(lambda x: x[x > 0], (ODD,), False),
    "list_index": Op(lambda x: x[:, [0, 2]], (ODD,), None),
    "gather": Op(lambda x, i: x.gather(-1, i), (LOGITS, T((6, 2), kind="below 7")), None),
    "index_select": Op(lambda x: x.index_select(0, torch.tensor([2, 0])), (ODD,), None),
    "narrow": Op(lambda x: x.narrow(1, 1, 3).narrow(-1, 0, 7), (ODD,), True),
    "block_by_slice": Op(lambda x: x[..., 8:16] * x[..., :8], (FUSED,), True),
    "split_others": Op(lambda x: x.split(2, dim=1)[1], (ODD,), True),
    "split_blocks": Op(lambda x: x.split(8, dim=-1)[2] * 1, (FUSED,), True),
    "split_by_sizes": Op(lambda x: x.split([8, 4, 4], -1)[1] * 1, (T((3, 5, 16), 2, blocks=(8, 4, 4)),), True),
    "split_of_divided": Op(lambda x: torch.split(x, 3, -1)[1] * 1, (ODD,), None),
    "chunk_others": Op(lambda x: x.chunk(2, 1)[0] * 1, (ODD,), True),
    "chunk_blocks": Op(lambda x: torch.mul(*x.chunk(2, -1)), (T((3, 5, 14), 2, blocks=2),), True),
    "chunk_of_divided": Op(lambda x: torch.mul(*x.chunk(2, -1)), (LAST,), None),
    "chunk_by_axis": Op(lambda x: x.chunk(2, axis=2)[0] * 1, (LAST,), None),
    "unbind": Op(lambda x: x.unbind(1)[2] * 1, (ODD,), True),
    "unbind_blocks": Op(lambda x: x.view(3, 5, 3, 4, 2).unbind(2)[1] * 1, (T((3, 5, 24), 2, 3, 2),), True),
    "unbind_by_axis": Op(lambda x: x.unbind(axis=2)[1] * 1, (ODD,), None),
    "cat": Op(lambda x, y: torch.cat([x, y], 1), (ODD, ODD), True),
    "cat_with_whole": Op(lambda x, y: torch.cat([y, x], dim=0), (ODD, T((2, 5, 7))), True),
    "cat_along_divided": Op(lambda x, y: torch.cat([x, y], -1), (ODD, ODD), None),
    "cat_by_axis": Op(lambda x, y: torch.cat([x, y], axis=2), (ODD, ODD), None),
    "cat_with_empty": Op(lambda x: torch.cat([torch.tensor([], dtype=x.dtype), x], -2), (ODD,), True),
    "fused_projection": Op(qkv, (T((3, 5, 24), 2, blocks=3, unit=2),), True),
    "fused_projection_of_three_heads": Op(lambda x: qkv(x, 3), (T((3, 5, 18), 2, blocks=3, unit=2),), True),
    # products
    "matmul_heads": Op(lambda q, k: q @ k.transpose(-1, -2), (HEADS, HEADS), True),
    "matmul_heads_whole": Op(lambda q, k: torch.matmul(q, k), (HEADS, T((3, 4, 2, 5))), True),
    "matmul_shared_heads": Op(lambda q, k: q @ k, (HEADS, T((3, 1, 2, 5))), True),
    "matmul_batch": Op(lambda a, b: torch.bmm(a, b), (ROWS, T((3, 8, 2), 0)), True),
    "matmul_rows": Op(lambda a, b: a @ b, (SEQ, T((8, 3))), True),
    "matmul_columns": Op(lambda a, b: a @ b, (T((3, 5, 8)), T((8, 7), 1)), True),
    "matmul_inner": Op(lambda a, b: a @ b, (ODD, T((7, 3), 0)), False),
    "matmul_inner_whole": Op(lambda a, b: a @ b, (ODD, T((7, 3))), None),
    "matmul_vector": Op(lambda a, b: a @ b, (ODD, T((7,))), None),
    "matmul_named": Op(lambda a, b: torch.matmul(a, other=b), (SEQ, T((8, 3))), None),
    "mm": Op(lambda a, b: torch.mm(a, b), (LOGITS, T((7, 3))), None),
    "baddbmm": Op(lambda a, b, c: torch.baddbmm(c, a, b), (ROWS, T((3, 8, 2), 0), T((3, 5, 2))), None),
    "einsum": Op(lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k), (HEADS, HEADS), None),
    "tensordot": Op(lambda a, b: torch.tensordot(a, b, dims=1), (SEQ, T((8, 3))), None),
    "attention": Op(attend, (HEADS, HEADS, HEADS), True),
    "attention_causal": Op(lambda q, k, v: attend(q, k, v, is_causal=True), (HEADS,) * 3, True),
    "attention_mask": Op(attend, (*(HEADS,) * 3, T((5, 5))), True),
    "attention_mask_per_head": Op(attend, (*(HEADS,) * 3, T((3, 4, 5, 5))), True),
    "attention_mask_of_padding": Op(lambda q, k, v: attend(q, k, v, torch.ones(3, 1, 1, 5) > 0), (HEADS,) * 3, True),
    "attention_grouped": Op(
        lambda q, k, v: attend(q, k, v, enable_gqa=True, scale=0.3),
        (HEADS, T((3, 2, 5, 2), 1), T((3, 2, 5, 2), 1)),
        True,
    ),
    "attention_grouped_whole_keys": Op(
        lambda q, k, v: attend(q, k, v, enable_gqa=True), (HEADS, T((3, 2, 5, 2)), T((3, 2, 5, 2))), True
    ),
    "attention_along_tokens": Op(attend, (T((3, 4, 5, 2), 2),) * 3, None),
    "attention_batch": Op(attend, (T((3, 4, 5, 2), 0),) * 3, True),
    "linear_tokens": Op(lambda x, w, b: F.linear(x, w, b), (SEQ, T((3, 8)), T((3,))), True),
    "linear_features": Op(lambda x, w, b: F.linear(x, w, b), (ODD, T((3, 7)), T((3,))), False),
    "linear_columns": Op(lambda x, w, b: F.linear(x, w, b), (T((3, 5, 8)), T((7, 8), 0), T((7,), 0)), True),
    "linear_columns_whole_bias": Op(lambda x, w, b: F.linear(x, w, b), (T((3, 5, 8)), T((7, 8), 0), T((7,))), True),
    "linear_rows": Op(lambda x, w, b: F.linear(x, w, b), (ODD, T((3, 7), 1), T((3,))), False),
    "linear_rows_of_whole": Op(lambda x, w: F.linear(input=x, weight=w), (T((3, 5, 7)), T((3, 7), 1)), False),
    "linear_columns_of_tokens": Op(F.linear, (SEQ, T((7, 8), 0)), True),
    "embedding_words": Op(F.embedding, (T((3, 5), kind="below 7"), T((7, 4), 0)), False),
    "embedding_features": Op(F.embedding, (T((3, 5), kind="below 7"), T((7, 5), 1)), True),
    "embedding_padding": Op(lambda i, w: F.embedding(i, w, 2), (T((3, 5), kind="below 7"), T((7, 4), 0)), False),
    # along dims
    "softmax_others": Op(lambda x: x.softmax(1), (ODD,), True),
    "softmax_divided": Op(lambda x: F.softmax(x, dim=-1), (ODD,), None),
    "log_softmax": Op(lambda x: F.log_softmax(x, dim=-1), (HEADS,), True),
    "softmax_named": Op(lambda x: torch.softmax(input=x, dim=-1), (HEADS,), True),
    "cumsum": Op(lambda x: x.cumsum(1) + x.cumsum(dim=-1), (ODD,), None),
    "normalize": Op(lambda x: F.normalize(x, dim=-1), (HEADS,), True),
    "normalize_divided": Op(lambda x: F.normalize(x, dim=-1), (ODD,), None),
    "layer_norm": Op(lambda x, w, b: F.layer_norm(x, (8,), w, b), (SEQ, T((8,)), T((8,))), True),
    "layer_norm_divided": Op(lambda x, w: F.layer_norm(x, (7,), w), (ODD, T((7,))), None),
    "layer_norm_divided_weight": Op(lambda x, w: F.layer_norm(x, (8,), w), (SEQ, T((8,), 0)), None),
    "rms_norm": Op(lambda x, w: F.rms_norm(x, (8,), w), (SEQ, T((8,))), True),
    "rms_norm_by_hand": Op(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))), (SEQ, T((8,))), True),
    "batch_norm": Op(lambda x: F.batch_norm(x, None, None, training=True), (T((6, 7), 1),), None),
    "sum_others": Op(lambda x: x.sum(1) + x.sum((0, 1)), (ODD,), True),
    "sum_keep": Op(lambda x: x.sum(dim=(0, 1), keepdim=True) * x, (ODD,), True),
    "sum_by_axis": Op(lambda x: x.sum(axis=0, keepdims=True) * x, (ODD,), None),
    "sum_divided": Op(lambda x: x.sum(-1), (ODD,), False),
    "sum_all": Op(lambda x: x.sum() + x.pow(2).mean(), (ODD,), False),
    "mean_divided_keep": Op(lambda x: x - x.mean(-1, keepdim=True), (ODD,), None),
    "var_std": Op(lambda x: x.var(1, unbiased=False) + x.std(dim=1), (ODD,), True),
    "max_others": Op(lambda x: x.max(1).values + x.amax(dim=1), (ODD,), True),
    "max_divided": Op(lambda x: x.max(-1).values, (ODD,), False),
    "max_of_two": Op(lambda x, y: torch.maximum(x, y) + torch.max(x, y), (ODD, ODD), None),
    "argmax": Op(lambda x: x.argmax(-1), (ODD,), False),
    "argmax_others": Op(lambda x: x.argmax(dim=1), (ODD,), True),
    "topk": Op(lambda x: x.topk(2)[0], (T((3, 5, 4, 7), 3),), False),
    "topk_others": Op(lambda x: x.topk(2, 1)[0], (ODD,), None),
    "sort": Op(lambda x: x.sort(-1, descending=True)[0], (ODD,), False),
    "norm": Op(lambda x: x.norm(), (ODD,), False),
    "norm_others": Op(lambda x: x.norm(dim=1), (ODD,), True),
    "norm_divided": Op(lambda x: x.norm(2, -1) + x.norm(1, dim=-1), (T((3, 5, 4, 7), 3),), False),
    "vector_norm": Op(lambda x: torch.linalg.vector_norm(x, 2, -1), (T((3, 5, 4, 7), 3),), False),
    "logsumexp": Op(lambda x: x.logsumexp(-1), (ODD,), False),
    "any_all": Op(lambda x: (x > 0).any(-1) & ~(x > 0).all(), (ODD,), False),
    # losses
    "loss": Op(F.cross_entropy, (LOGITS, TARGETS), False),
    "loss_weight": Op(lambda x, t, w: F.cross_entropy(x, t, weight=w.detach()), (LOGITS, TARGETS, CLASSES), False),
    "loss_ignored": Op(lambda x, t: F.cross_entropy(x, t, ignore_index=3), (LOGITS, TARGETS), False),
    "loss_all_ignored": Op(lambda x, t: F.cross_entropy(x, t * 0 - 100, reduction="sum"), (LOGITS, TARGETS), False),
    "loss_all_ignored_mean": Op(lambda x, t: F.cross_entropy(x, t * 0 - 100), (LOGITS, TARGETS), False),
    "loss_smoothed": Op(
        lambda x, t, w: F.cross_entropy(x, t, w.detach(), label_smoothing=0.2, ignore_index=3),
        (LOGITS, TARGETS, CLASSES),
        False,
    ),
    "loss_each": Op(
        lambda x, t: F.cross_entropy(x, t, reduction="none", label_smoothing=0.1), (LOGITS, TARGETS), False
    ),
    "loss_of_sequences": Op(
        lambda x, t: F.cross_entropy(x.transpose(1, 2), t), (T((3, 5, 7), 2), T((3, 5), kind="below 7")), False
    ),
    "loss_of_tokens_divided": Op(F.cross_entropy, (T((6, 7), 0), TARGETS), False),
    "loss_probabilities": Op(lambda x, y: F.cross_entropy(x, y.softmax(-1)), (LOGITS, T((6, 7))), False),
    "nll": Op(lambda x, t: F.nll_loss(x.log_softmax(-1), t), (LOGITS, TARGETS), False),
    "mse": Op(lambda x, y: F.mse_loss(x, y), (ODD, T((3, 5, 7))), False),
    # arguments by name, in any order
    "narrow_named": Op(lambda x: x.narrow(dim=1, length=3, start=1), (ODD,), True),
    "repeat_interleave_named": Op(lambda x: torch.repeat_interleave(x, dim=1, repeats=2), (HEADS,), True),
    "unsqueeze_named": Op(lambda x: x.unsqueeze(dim=-1) * 2, (ODD,), True),
    "unflatten_swapped": Op(lambda x: x.unflatten(sizes=(4, -1), dim=2), (T((3, 5, 8), 2, unit=2),), True),
    "where_are_they": Op(lambda x: torch.stack(torch.where(x > 0)), (ODD,), False),
    "view_as": Op(lambda x: heads(x).transpose(1, 2).reshape(3, 5, 8).view_as(x), (LAST,), True),
    "reshape_as": Op(lambda x, y: x.reshape_as(y), (LAST, T((15, 8))), True),
    "expand_as_divided": Op(lambda x: x[:, :1].expand_as(x) * 2, (ODD,), True),
    "out": Op(lambda x: torch.mul(x.detach(), 2.0, out=torch.empty(3, 5, 7).double()) * 1, (ODD,), False),
    "out_is_written": Op(lambda x: written_to(x, torch.zeros(3, 5, 7).double()), (ODD,), False),
    # autograd functions of the user's
    "function_reversing": Op(lambda x: Reversed.apply(x) * 2, (ODD,), True),
    "function_saving_its_output": Op(lambda x: OwnTanh.apply(x) * 2, (ODD,), True),
    "function_saving_inputs": Op(lambda x, w, s: OwnNorm.apply(2.0, x, w, s) * 2, (ODD, T((7,)), T(())), True),
    "function_of_several": Op(lambda x: sum(Several.apply(x)), (ODD,), None),
    # in place
    "add_in_place": Op(lambda x, y: changed(x, lambda t: t.add_(y, alpha=0.5)), (ODD, T((3, 5, 7))), True),
    "compound_add": Op(lambda x, y: compound(x, y, "+"), (ODD, ODD), True),
    "compound_power": Op(lambda x: compound(x, 2, "**"), (ODD,), None),
    "masked_fill_in_place": Op(lambda x: changed(x, lambda t: t.masked_fill_(x > 0.5, 1.0)), (ODD,), True),
    "clamp_in_place": Op(lambda x: changed(x, lambda t: t.clamp_(max=0.3)), (ODD,), True),
    "relu_in_place": Op(lambda x: F.relu(x * 1, inplace=True), (ODD,), True),
    "copy_in_place": Op(lambda x, y: changed(x, lambda t: t.copy_(y)), (ODD, T((5, 7))), True),
    "without_rule_in_place": Op(lambda x: changed(x, lambda t: t.erf_()), (ODD,), None),
    "assign_slice": Op(lambda x: assign(x, (slice(None), 1), 0.5), (ODD,), None),
    "assign_divided": Op(lambda x: assign(x, (..., slice(1, 4)), 2.0), (ODD,), None),
    "assign_tensor": Op(lambda x, y: assign(x, (0, slice(1, 3)), y), (ODD, T((2, 7), 1)), None),
    "assign_mask": Op(lambda x: assign(x, x > 0, -1.0), (ODD,), None),
    "of_whole_by_divided": Op(lambda x, y: changed(x, lambda t: t.mul_(y)), (T((3, 5, 7)), ODD), None),
    "view_written": Op(lambda x: changed(x, lambda t: t.view(-1, 7)[1].mul_(3.0)), (ODD,), None),
    "torn_view_written": Op(lambda x: changed(x, lambda t: t.view(3, 5, 2, 4)[..., 1].zero_()), (LAST,), None),
    "diagonal_written": Op(lambda x: changed(x, lambda t: t.diagonal(dim1=1, dim2=2).fill_(0.3)), (ODD,), None),
    "number_of_divided_written": Op(lambda x: changed(x, lambda t: t[..., 3].exp_()), (ODD,), None),
    "narrow_written": Op(
        lambda x: changed(x, lambda t: t.narrow(-1, 2, 3).mul_(t.narrow(-1, 0, 3).clone())), (ODD,), None
    ),
    "two_views_written": Op(lambda x: changed(x, two_columns), (ODD,), None),
    "view_read_after_a_write": Op(lambda x: changed(x, read_later), (ODD,), None),
    "out_is_a_view": Op(lambda x: out_into_a_row(x), (ODD,), None),
    "list": Op(lambda x, y: torch._foreach_mul([x, y], [2.0, 3.0]), (ODD, T((3,))), True),
    "list_in_place": Op(lambda x, y: changed(x, lambda t: torch._foreach_add_([t], [y])), (ODD, T((3, 5, 7))), True),
    "list_of_mixed": Op(lambda x, y: changed(y, lambda t: torch._foreach_add_([t], [x])), (ODD, T((3, 5, 7))), None),
    "index_add_in_place": Op(
        lambda x, y: changed(x, lambda t: t.index_add_(1, torch.tensor([0, 3]), y)), (ODD, T((3, 2, 7))), None
    ),
}


PARTS = 8
"""The table is gone through in so many tests."""


@ranks(2, 4)
@pytest.mark.parametrize("part", range(PARTS))
def test_values_and_gradients_are_those_of_plain_tensors(part: int) -> None:
    axis = mesh().tp
    for name in list(OPS)[part::PARTS]:
        try:
            compare(OPS[name], axis)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def compare(op: Op, axis: Any) -> None:
    """Values, gradients, and whether the result stays divided."""
    plain = [operand.values(seed) for seed, operand in enumerate(op.operands)]
    ours = [operand.values(seed) for seed, operand in enumerate(op.operands)]
    want = leaves(op.call(*plain))
    got = leaves(op.call(*(divided(x, axis, operand) for x, operand in zip(ours, op.operands, strict=True))))
    assert len(got) == len(want) > 0
    if op.stays is not None:
        assert isinstance(got[0], SplitTensor) is op.stays, f"{'whole' if op.stays else 'divided'}: {got[0]}"
    losses = []
    for mine, theirs in zip(got, want, strict=True):
        if isinstance(mine, SplitTensor):
            assert whole_shape(mine) == tuple(mine.shape) == tuple(theirs.shape)
            part = list(theirs.shape)
            part[mine.lie.dim] = mine.lie.local_size
            assert tuple(without_answers(mine).shape) == tuple(part)
        assert mine.dtype == theirs.dtype
        all_of_it = put_together(mine)
        torch.testing.assert_close(all_of_it.detach(), theirs.detach(), equal_nan=True, **EXACT)
        if theirs.requires_grad:
            assert mine.requires_grad
            factors = T(tuple(theirs.shape)).values(99).detach()
            losses.append(((all_of_it * factors).sum(), (theirs * factors).sum()))
    for mine, theirs in losses:
        mine.backward(retain_graph=True)
        theirs.backward(retain_graph=True)
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, equal_nan=True, **EXACT)


def test_the_table_is_as_long_as_it_says() -> None:
    assert len(OPS) >= 150
    assert sum(op.stays is True for op in OPS.values()) >= 70
    assert len(WRITES) >= 25


# Parameters -----------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any], object]] = {
    "fill": lambda p: p.fill_(0.5),
    "clamp": lambda p: p.clamp_(-0.1, 0.1),
    "row": lambda p: p[0].zero_(),
    "row_of_data": lambda p: p.data[2].zero_(),
    "row_of_detached": lambda p: p.detach()[2].zero_(),
    "elements_of_a_view": lambda p: p.data.view(-1)[3:7].fill_(3.0),
    "view_of_a_view": lambda p: p.data.view(2, 3, 5)[1].t()[0].mul_(2.0),
    "chunk": lambda p: p.data.chunk(4)[1].add_(1.0),
    "column": lambda p: p[:, 1].neg_(),
    "assigned_row": lambda p: p.__setitem__(1, 0.25),
    "assigned_elements": lambda p: p.data.__setitem__((slice(1, 5), slice(0, 2)), torch.ones(4, 2).double()),
    "assigned_by_mask": lambda p: p.__setitem__(p > 0, 0.0),
    "assigned_data": lambda p: setattr(p, "data", torch.arange(30.0).double().view(6, 5)),
    "transposed": lambda p: p.data.t()[0].zero_(),
    "diagonal": lambda p: p.diagonal().fill_(1.0),
    "compound": lambda p: p.data.__imul__(2.0),
    "scaled_by_its_norm": lambda p: p.div_(p.norm()),
    "rows_scaled": lambda p: p.mul_((1.0 / p.norm(dim=1)).unsqueeze(1)),
    "copied_row": lambda p: p[4].copy_(p[0]),
    "normal": lambda p: nn.init.normal_(p),
    "kaiming": lambda p: nn.init.kaiming_uniform_(p),
    "orthogonal": lambda p: nn.init.orthogonal_(p),
    "eye": lambda p: nn.init.eye_(p),
    "constant": lambda p: nn.init.constant_(p, 2.0),
    "uniform_part": lambda p: p.data[3:].uniform_(),
    "list": lambda p: torch._foreach_mul_([p], 0.5),
    "list_of_the_same": lambda p: torch._foreach_add_([p, p.data, p], 1.0),
    "list_by_whole_tensors": lambda p: torch._foreach_copy_([p], [torch.arange(30.0).double().view(6, 5)]),
    "list_by_lists": lambda p: torch._foreach_lerp_([p.data], [p.detach().abs()], 0.25),
    "list_by_numbers": lambda p: torch._foreach_div_((p, p), (2.0, 4.0)),
    "list_of_rows": lambda p: torch._foreach_zero_([p.data[0], p.data[3]]),
    "list_of_pieces": lambda p: torch._foreach_neg_(p.data.split(4)),
    "list_of_out": lambda p: torch.sort(
        torch.arange(30.0).double().flip(0).view(6, 5), out=(p.data, torch.empty(6, 5, dtype=torch.long))
    ),
    "in_place_by_name": lambda p: F.threshold(p.data, 0.1, 0.3, inplace=True),
    "fused_step": lambda p: torch._fused_sgd_(
        [p],
        [torch.ones(6, 5).double()],
        [],
        weight_decay=0.1,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    ),
}


def cut_parameter(axis: Any, dim: int) -> tuple[nn.Parameter, nn.Parameter]:
    """The same parameter of (6, 5), plain and cut."""
    plain, cut = (nn.Parameter(T((6, 5)).values(3).detach()) for _ in range(2))
    cut_in_place(cut, axis, dim, even_split(cut.shape[dim], axis.size))
    return plain, cut


@ranks(2, 4)
@pytest.mark.parametrize("dim", [0, 1])
def test_writes_into_cut_parameters_arrive(dim: int) -> None:
    """Whatever is written into a parameter, or into a view of its data, is what a plain parameter would hold."""
    axis = mesh().tp
    for name, write in WRITES.items():
        plain, cut = cut_parameter(axis, dim)
        before = plain.detach().clone()
        for parameter in (plain, cut):
            torch.manual_seed(4)
            with torch.no_grad():
                write(parameter)
        assert not torch.equal(plain, before), name
        assert isinstance(cut, SplitTensor)
        torch.testing.assert_close(whole(cut).detach(), plain.detach(), msg=name, **EXACT)


@ranks(2)
def test_lists_of_cut_parameters_are_written_in_parts() -> None:
    """Nothing is sent for an average of all weights, as `torch.optim.swa_utils` keeps it."""
    axis = mesh().tp
    (plain, cut), (other, cut_other) = cut_parameter(axis, 0), cut_parameter(axis, 1)
    with torch.no_grad(), axis.ledger.measure() as sent:
        for parameters in ([plain, other], [cut, cut_other]):
            torch._foreach_lerp_(parameters, torch._foreach_mul(parameters, 2.0), 0.25)
    assert sent.total() == 0
    for mine, want in ((cut, plain), (cut_other, other)):
        torch.testing.assert_close(whole(mine), want, **EXACT)  # type: ignore[arg-type]


@ranks(2)
def test_arrays_of_cut_parameters_may_be_read() -> None:
    """Writes into a NumPy array cannot be followed into the parts, so they are refused."""
    plain, cut = cut_parameter(mesh().tp, 0)
    for view in (lambda p: p.data, lambda p: p.detach()[1:], lambda p: p.data.t()):
        array = view(cut).numpy()
        assert (array == view(plain).numpy()).all()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0.0
    with pytest.raises(UnsupportedModelError, match=r"unsqueeze_ would change the shape \(6, 5\)"):
        cut.data.unsqueeze_(0)


@ranks(2, 4)
def test_hooks_see_whole_gradients() -> None:
    """A hook that scales by the norm of the gradient, on a parameter and in the middle of a graph."""
    plain, cut = cut_parameter(mesh().tp, 0)
    shapes = []

    def scaled(gradient: Tensor) -> Tensor:
        shapes.append(tuple(gradient.shape))
        return gradient / gradient.norm()

    for parameter in (plain, cut):
        x = torch.linspace(-1, 1, 10).double().view(2, 5)
        parameter.register_hook(scaled)  # type: ignore[no-untyped-call]
        y = F.linear(x, parameter) * 2
        y.register_hook(scaled)
        y.pow(3).sum().backward()
    assert shapes == [(2, 6), (6, 5)] * 2
    assert plain.grad is not None
    own = pairs.take(plain.grad, cut.lie.axis, 0, cut.lie.split)  # type: ignore[attr-defined]
    torch.testing.assert_close(cut.grad, own, **EXACT)


@ranks(2)
def test_a_view_of_a_collected_parameter_is_a_plain_tensor_otherwise() -> None:
    plain, cut = cut_parameter(mesh().tp, 0)
    row = cut.data[1]
    assert type(row + 1) is Tensor
    assert type(copy.deepcopy(row)) is Tensor
    torch.testing.assert_close(row.sum(), plain[1].sum().detach(), **EXACT)
    assert type(cut[1] * 2) is Tensor
    with pytest.raises(RuntimeError, match="leaf Variable"):  # as of a plain parameter, whose history knows no writes
        cut[1].zero_()
    assert torch.cumsum(plain.detach(), 0, out=cut.data) is not None
    torch.testing.assert_close(whole(cut).detach(), plain.detach().cumsum(0), **EXACT)


@ranks(2, 4)
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_that_are_asked_for(dim: int) -> None:
    """`torch.autograd.grad` by a cut parameter, by a whole tensor and by one in the middle of the graph."""
    plain, cut = cut_parameter(mesh().tp, dim)
    found = []
    for parameter in (plain, cut):
        x = torch.linspace(-1, 1, 10).double().view(2, 5).requires_grad_()
        y = F.linear(x, parameter).tanh()
        by = torch.autograd.grad((y * y).sum() + parameter.pow(3).sum(), [parameter, x, y], retain_graph=True)
        factors = torch.linspace(0, 1, 12).double().view(2, 6)
        found.append([*by, *torch.autograd.grad([y], [parameter], grad_outputs=[factors])])
    for mine, want in zip(found[1], found[0], strict=True):
        assert mine.shape == want.shape
        torch.testing.assert_close(put_together(mine).detach(), want.detach(), **EXACT)


@ranks(2)
def test_second_derivatives_are_refused() -> None:
    """A gradient penalty would need collectives that know two backwards. First ones that keep a graph are right."""
    axis = mesh().tp
    plain, cut = cut_parameter(axis, 0)
    target = torch.tensor([2, 5])
    calls: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "alone": lambda p, x: F.linear(x, p).tanh().sum(),
        "rows": lambda p, x: F.linear(F.linear(x, p).tanh(), p.t()).pow(2).sum(),
        "loss": lambda p, x: F.cross_entropy(F.linear(x, p), target),
        "collected": lambda p, x: F.linear(x, p).cumsum(1).pow(2).sum(),
    }
    for name, call in calls.items():
        found = []
        for parameter in (plain, cut):
            x = torch.linspace(-1, 1, 10).double().view(2, 5).requires_grad_()
            found.append(torch.autograd.grad(call(parameter, x), [x], create_graph=True)[0])
        torch.testing.assert_close(found[1].detach(), found[0].detach(), msg=name, **EXACT)
        with pytest.raises(UnsupportedModelError, match=r"gradient of a gradient .*create_graph=True.*replicate"):
            found[1].pow(2).sum().backward()


# Random numbers -------------------------------------------------------------------------------------------------


@ranks(2, 4)
def test_masks_differ_where_tensors_are_divided_and_agree_where_they_are_not() -> None:
    world = mesh()
    axis = world.tp
    torch.manual_seed(8)
    alike = F.dropout(torch.ones(64), 0.5)
    ones = split_tensor(torch.ones(4, 64), Lie(axis, 1, even_split(64 * axis.size, axis.size)))
    own = F.dropout(ones, 0.5)
    drawn = torch.rand_like(own)
    after = torch.rand(4)
    assert isinstance(own, SplitTensor)
    said: Any = world.rollcall.exchange([t.tolist() for t in map(without_answers, (alike, own, drawn, after))])
    for index, differ in enumerate([False, True, True, False]):
        kinds = {str(entry[index]) for entry in said}
        assert len(kinds) == (axis.size if differ else 1), index
    mask = whole(own)
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert 0.3 < float((mask == 0).double().mean()) < 0.7


@ranks(2)
def test_a_dropout_that_drops_nothing_draws_nothing() -> None:
    """As of plain tensors: the common stream goes on as in one process."""
    axis = mesh().tp
    x = divided(LAST.values(0), axis, LAST)
    torch.manual_seed(8)
    want = torch.rand(3)
    torch.manual_seed(8)
    F.dropout(x, 0.1, training=False)
    F.dropout(x, 0.0)
    torch.testing.assert_close(torch.rand(3), want, rtol=0, atol=0)


@ranks(2)
def test_tensors_drawn_like_divided_ones_are_those_of_one_process() -> None:
    plain, cut = cut_parameter(mesh().tp, 1)
    for draw in (torch.rand_like, torch.randn_like):
        found = []
        for like in (plain, cut):
            torch.manual_seed(5)
            found.append((put_together(draw(like, dtype=torch.float32)), torch.rand(3)))
        for mine, want in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(mine, want, rtol=0, atol=0)


@ranks(2)
def test_local_draws_come_again_when_the_common_stream_is_restored() -> None:
    axis = mesh().tp
    state = torch.random.get_rng_state()
    with local_draws(axis, torch.device("cpu")):
        first = torch.rand(5)
    after = torch.rand(5)
    torch.random.set_rng_state(state)
    with local_draws(axis, torch.device("cpu")):
        again = torch.rand(5)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    torch.testing.assert_close(torch.rand(5), after, rtol=0, atol=0)
    with pytest.raises(ValueError, match="boom"), local_draws(axis, torch.device("cpu")):
        raise ValueError("boom")
