"""Products of matrices and what is made of them: linears, embeddings, attention, the loss."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from lightning_dist.comm import pairs
from lightning_dist.params.questions import without_answers
from lightning_dist.tensor.draws import local_draws
from lightning_dist.tensor.layers import SEQUENCE, add_bias, column_parallel, row_parallel, vocab_parallel_embedding
from lightning_dist.tensor.loss import cross_entropy
from lightning_dist.tensor.parameter import CutParameter
from lightning_dist.tensor.rules.operands import Args, Kwargs, matched, ndim_of, shared
from lightning_dist.tensor.split_tensor import Lie, SplitTensor, split_tensor, whole_shape


def matmul(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Batches and heads side by side; rows of the left, columns of the right; or a sum over the divided dim."""
    if kwargs or len(args) != 2 or ndim_of(args[0]) < 2 or ndim_of(args[1]) < 2:
        return NotImplemented
    a, b = args
    first = a if isinstance(a, SplitTensor) else b
    lie, r = first.lie, ndim_of(first) - first.lie.dim
    if r >= 3:
        left, right = matched(a, lie, r), matched(b, lie, r)
    elif r == 2 and first is a and not isinstance(b, SplitTensor):
        left, right = without_answers(a), shared(b, lie)
    elif r == 1 and first is b and not isinstance(a, SplitTensor):
        left, right = shared(a, lie), without_answers(b)
    elif r == 1 and isinstance(b, SplitTensor) and ndim_of(b) - b.lie.dim == 2 and b.lie.split == lie.split:
        return pairs.total(without_answers(a) @ without_answers(b), lie.axis)
    else:
        return NotImplemented
    if left is None or right is None:
        return NotImplemented
    out = left @ right
    return split_tensor(out, Lie(lie.axis, out.ndim - r, lie.split))


def linear(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Cut weights: the layers of `layers`. Whole ones: token by token, or as a sum over divided features."""
    x, weight = (*args, *(kwargs[k] for k in ("input", "weight") if k in kwargs))[:2]
    bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
    if isinstance(weight, SplitTensor):
        if ndim_of(weight) != 2:
            return NotImplemented
        layer = column_parallel if weight.lie.dim == 0 else row_parallel
        return layer(x, weight, bias, weight.lie)
    if not isinstance(x, SplitTensor):
        return NotImplemented
    lie = x.lie
    if ndim_of(x) - lie.dim == 1:
        return add_bias(
            pairs.total(F.linear(without_answers(x), pairs.take(weight, lie.axis, 1, lie.split)), lie.axis), bias
        )
    bias = None if bias is None else shared(bias, lie)
    return split_tensor(F.linear(without_answers(x), shared(weight, lie), bias), lie)


def addmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``bias + x @ weight`` with a cut weight: a linear whose weight lies the other way round."""
    if kwargs or len(args) != 3 or not isinstance(args[2], CutParameter):
        return NotImplemented
    bias, x, weight = args
    lie = Lie(weight.lie.axis, 1 - weight.lie.dim, weight.lie.split)
    turned = split_tensor(without_answers(weight).t(), lie)
    turned.__dict__.update({k: v for k, v in weight.__dict__.items() if k == SEQUENCE})
    return linear(func, (x, turned, bias), {})


def embedding(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A table cut along its words, or along its features."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    ids, weight = given["input"], given["weight"]
    if not isinstance(weight, SplitTensor) or isinstance(ids, SplitTensor):
        return NotImplemented
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse"):
        return NotImplemented
    if weight.lie.dim == 0 and len(weight.lie.split.blocks) > 1:  # a rank's words are not one run of them
        return NotImplemented
    if weight.lie.dim == 0:
        return vocab_parallel_embedding(ids, weight, given.get("padding_idx"), weight.lie)
    out = F.embedding(ids, without_answers(weight), given.get("padding_idx"))
    return split_tensor(out, Lie(weight.lie.axis, out.ndim - 1, weight.lie.split))


def attention(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Scaled dot-product attention with divided heads (or batches): every rank attends with its own."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query = given["query"]
    if not isinstance(query, SplitTensor) or ndim_of(query) - query.lie.dim < 3:
        return NotImplemented
    lie, r = query.lie, ndim_of(query) - query.lie.dim
    if given.pop("enable_gqa", False):
        for name in ("key", "value"):
            shape = whole_shape(given[name]) if isinstance(given[name], SplitTensor) else given[name].shape
            given[name] = given[name].repeat_interleave(whole_shape(query)[-3] // shape[-3], -3)
    for name in ("query", "key", "value", "attn_mask"):
        if isinstance(given.get(name), Tensor):
            given[name] = matched(given[name], lie, r)
            if given[name] is None:
                return NotImplemented
    if given.get("dropout_p", 0.0) > 0.0:
        with local_draws(lie.axis, given["query"].device):
            out = func(**given)
    else:
        out = func(**given)
    return split_tensor(out, Lie(lie.axis, out.ndim - r, lie.split))


def loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Cross entropy of logits that are divided along the vocabulary, without collecting them."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    logits, target = given.pop("input"), given.pop("target")
    if not isinstance(logits, SplitTensor) or isinstance(target, SplitTensor) or target.is_floating_point():
        return NotImplemented
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        return NotImplemented
    lie = logits.lie
    if lie.dim != (1 if ndim_of(logits) > 1 else 0) or len(lie.split.blocks) > 1:
        return NotImplemented
    return cross_entropy(without_answers(logits).movedim(lie.dim, -1), target, lie.axis, lie.split, **given)
