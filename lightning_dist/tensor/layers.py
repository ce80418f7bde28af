"""The layers of tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053, sec. 3; Korthikanti et al. 2022, sec. 4).

A pair of linears is cut so that nothing is sent between them::

    x ──f──▶ A_r (columns) ──▶ act ──▶ B_r (rows) ──g──▶ y         y = sum over ranks act(x A_r) B_r

    f: identity, backward all-reduce        g: all-reduce, backward identity
    with sequence parallelism, x and y are divided along the sequence outside of the pair:
    f: all-gather, backward reduce-scatter  g: reduce-scatter, backward all-gather

Per transformer layer that makes two all-reduces of (b, s, h) in forward and two in backward.

Linears that read the same input (query, key and value; gate and up) share one f, so its backward sends once. The
all-reduce of the input's gradient runs while the gradients of the weights are computed: `_Products` defers these until
it has been started. Under sequence parallelism backward gathers the input once more in place of keeping it (Korthikanti
et al., sec. 4.2.2), which is booked as traffic of its own.
"""

import weakref
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dist.comm import pairs
from lightning_dist.comm.mesh import Axis
from lightning_dist.comm.once import once_differentiable
from lightning_dist.core.split import Split, even_split
from lightning_dist.params.questions import without_answers
from lightning_dist.tensor.autocast import for_product, product_dtype
from lightning_dist.tensor.split_tensor import Lie, SplitTensor, split_tensor, whole

REGATHERED = "regathered input"


@dataclass(frozen=True)
class Tokens:
    """How the tokens of an input are divided: along `dim` by `split`; None where every rank has all of them."""

    dim: int
    split: Split


@dataclass(eq=False)
class Siblings:
    """Column-parallel weights that read the same input, and the input that they share at the moment."""

    axis: Axis
    sequence_parallel: bool = False
    weights: list[nn.Parameter] = field(default_factory=list)
    seen: "weakref.ref[Tensor] | None" = None
    state: tuple[Any, ...] = ()
    shared: "tuple[Tensor, _Pass] | None" = None

    def forget(self) -> None:
        """The forward of their module is over."""
        self.seen = self.shared = None

    def enter(self, x: Tensor) -> "tuple[Tensor, _Pass]":
        """The input as the products read it; the same object for all that read the same `x`."""
        trained = [w.requires_grad for w in self.weights]
        state = (x._version, x.requires_grad, torch.is_grad_enabled(), product_dtype(x), *trained)
        same = self.seen is not None and self.seen() is x and self.state == state
        if same and self.shared is not None and not self.shared[1].spent:
            return self.shared
        tokens = Tokens(x.lie.dim, x.lie.split) if isinstance(x, SplitTensor) else None
        record = _Pass(self.axis, tokens)
        weights = [without_answers(w) if w.requires_grad else w.detach() for w in self.weights]
        entered: Tensor = _Enter.apply(  # type: ignore[no-untyped-call]
            for_product(without_answers(x) if isinstance(x, SplitTensor) else x), record, *weights
        )
        self.seen, self.state = weakref.ref(x), state
        self.shared = (entered, record)
        return self.shared


@dataclass(eq=False)
class _Pass:
    """One use of an input: the gradients of the products' outputs, until the weights' gradients are made of them.

    A backward that asks for a bias or an activation only runs products and stops before the weights: what it left is
    of no use to the next one, so gradients are kept with the number of their backward.
    """

    axis: Axis
    tokens: Tokens | None
    spent: bool = False  # some backward has come through, so the graph may be gone
    backward: int = -1
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)

    def of_this_backward(self) -> dict[int, list[Tensor]]:
        """By weight, the gradients of its outputs."""
        current = torch._C._current_graph_task_id()
        if self.backward != current:
            self.backward, self.outputs = current, {}
        return self.outputs


class _Enter(torch.autograd.Function):
    """f: the shared input; its backward sends the input's gradient and meanwhile computes those of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, record: _Pass, *weights: Tensor) -> Tensor:
        ctx.record = record
        ctx.save_for_backward(x)
        if record.tokens is None:
            return x.view_as(x)
        return record.axis.gather_parts(x, record.tokens.dim, record.tokens.split, purpose=pairs.ACTIVATIONS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        record: _Pass = ctx.record
        record.spent, outputs = True, record.of_this_backward()
        (x,) = ctx.saved_tensors
        axis, tokens, grad = record.axis, record.tokens, grads[0]
        pending = None
        result: Tensor | None = None
        wanted = [index for index in outputs if ctx.needs_input_grad[2 + index]]
        if tokens is not None and wanted:
            x = axis.gather_parts(x, tokens.dim, tokens.split, purpose=REGATHERED)
        if ctx.needs_input_grad[0]:
            if tokens is None:
                result = grad.contiguous().clone() if grad._base is not None or not grad.is_contiguous() else grad
                pending = axis.start_all_reduce(result, purpose=pairs.ACTIVATIONS)
            else:
                pending, result = axis.start_total_parts(grad, tokens.dim, tokens.split, purpose=pairs.ACTIVATIONS)
        flat = _rows(x)
        by_weight: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 2)
        for index in wanted:
            for output in outputs[index]:
                product = _rows(output).t() @ flat
                known = by_weight[index]
                by_weight[index] = product if known is None else known + product
        outputs.clear()
        if pending is not None:
            pending.wait()
        return (result, None, *by_weight)


class _Product(torch.autograd.Function):
    """``x @ weight.t() + bias`` whose weight gradient is left to `_Enter`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, record: _Pass, index: int, needs_input: bool
    ) -> Tensor:
        ctx.save_for_backward(weight if needs_input else None)
        ctx.record, ctx.index, ctx.needs_input, ctx.shape = record, index, needs_input, x.shape
        return F.linear(x, weight, bias).detach()  # a linear returns a view, into which nobody could write in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        grad = grads[0]
        ctx.record.of_this_backward().setdefault(ctx.index, []).append(grad)
        to_input = grad @ weight if ctx.needs_input else grad.new_zeros(()).expand(ctx.shape)
        to_bias = _rows(grad).sum(0) if ctx.needs_input_grad[2] else None
        return to_input, None, to_bias, None, None, None


def _rows(x: Tensor) -> Tensor:
    """(..., n) as (tokens, n); n may be 0, on ranks that are left without a feature."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def column_parallel(x: Tensor, weight: Tensor, bias: Tensor | None, lie: Lie) -> SplitTensor:
    """Output features divided: ``x (..., in), weight (out/tp, in), bias (out/tp) -> (..., out)``, split along the last.

    Args:
        x: the same on all ranks, or divided along its tokens (sequence parallelism).
        weight: the cut weight as the module holds it; its `lie` says how the output features are divided.
        bias: cut alike, or None.
    """
    axis = lie.axis
    if isinstance(x, SplitTensor) and x.lie.dim == len(x.shape) - 1:
        x = whole(x)
    siblings = weight.__dict__.get(SIBLINGS) if isinstance(weight, nn.Parameter) else None
    own_bias = _part_of_bias(bias, lie)
    if siblings is None or not torch.is_grad_enabled():
        entered = _enter_alone(x, axis)
        out = F.linear(entered, without_answers(weight), own_bias)
    else:
        entered, record = siblings.enter(x)
        index = next(i for i, w in enumerate(siblings.weights) if w is weight)
        read = for_product(without_answers(weight).detach())
        own_bias = None if own_bias is None else for_product(own_bias)
        out = _Product.apply(  # type: ignore[no-untyped-call]
            entered, read, own_bias, record, index, x.requires_grad
        )
    return split_tensor(out, Lie(axis, out.ndim - 1, lie.split))


def _part_of_bias(bias: Tensor | None, lie: Lie) -> Tensor | None:
    if bias is None or (isinstance(bias, SplitTensor) and bias.lie.split == lie.split):
        return None if bias is None else without_answers(bias)
    return pairs.take(whole(bias) if isinstance(bias, SplitTensor) else bias, lie.axis, 0, lie.split)


def _enter_alone(x: Tensor, axis: Axis) -> Tensor:
    x = for_product(x)
    if isinstance(x, SplitTensor):
        return pairs.collect_for_use(without_answers(x), axis, x.lie.dim, x.lie.split)
    return pairs.spread(x, axis) if x.requires_grad else x


SIBLINGS = "_lightning_dist_siblings"
"""Attribute under which a column-parallel weight carries its `Siblings`."""

SEQUENCE = "_lightning_dist_sequence"
"""Attribute of a weight whose output is divided along the sequence (sequence parallelism)."""


def row_parallel(x: Tensor, weight: Tensor, bias: Tensor | None, lie: Lie) -> Tensor:
    """Input features divided: ``x (..., in) split along the last dim, weight (out, in/tp) -> (..., out)``, the sum.

    The bias (out) is whole and added once. Under sequence parallelism the result is divided along its tokens.
    """
    if isinstance(x, SplitTensor) and x.lie.dim == len(x.shape) - 1 and x.lie.split == lie.split:
        part = without_answers(x)
    else:
        part = pairs.take(whole(x) if isinstance(x, SplitTensor) else x, lie.axis, len(x.shape) - 1, lie.split)
    summand = F.linear(part, without_answers(weight))
    return add_bias(total(summand, lie.axis, sequence_parallel=SEQUENCE in weight.__dict__), bias)


def vocab_parallel_embedding(ids: Tensor, weight: Tensor, padding_idx: int | None, lie: Lie) -> Tensor:
    """``ids (...), weight (V/tp, h) -> (..., h)``: each rank looks up its own words, the sum has all of them."""
    start, width = lie.split.start(lie.axis.rank), lie.local_size
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < lie.split.size:
        raise IndexError(f"an index is outside the embedding of {lie.split.size}")
    own = ids - start
    mine = (own >= 0) & (own < width)
    own_padding = None
    if padding_idx is not None and start <= padding_idx % lie.split.size < start + width:
        own_padding = padding_idx % lie.split.size - start
    table = without_answers(weight)
    if width:
        found = F.embedding(own.clamp(0, width - 1), table, own_padding).masked_fill(~mine.unsqueeze(-1), 0.0)
    else:
        found = table.new_zeros(*ids.shape, table.shape[1]) + table.sum()
    return total(found, lie.axis, sequence_parallel=SEQUENCE in weight.__dict__)


def total(summand: Tensor, axis: Axis, *, sequence_parallel: bool) -> Tensor:
    """The sum over the ranks: whole, or divided along the tokens where their number divides."""
    dim = summand.ndim - 2
    if not sequence_parallel or dim < 0 or summand.shape[dim] % axis.size or summand.shape[dim] < 2:
        return pairs.total(summand, axis)
    split = even_split(summand.shape[dim], axis.size)
    return split_tensor(pairs.total_parts(summand, axis, dim, split), Lie(axis, dim, split))


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """The bias of a linear. The rules of elementwise functions know what a divided `x` means for its gradient."""
    return x if bias is None else x + for_product(bias)
