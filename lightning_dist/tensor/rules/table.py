"""The table: from torch functions to rules."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dist.tensor.multi_head import multi_head
from lightning_dist.tensor.rules.along import along, normalization, reduction
from lightning_dist.tensor.rules.gradients import backward, differentiate
from lightning_dist.tensor.rules.operands import Rule
from lightning_dist.tensor.rules.pointwise import (
    DATA,
    casting,
    data_of,
    drawing_like,
    dropping,
    each,
    elementwise,
    hooking,
    in_place,
    set_data,
)
from lightning_dist.tensor.rules.products import addmm, attention, embedding, linear, loss, matmul
from lightning_dist.tensor.rules.shapes import (
    by_number,
    by_size,
    expand,
    flatten,
    getitem,
    joining,
    last_two,
    like_other,
    narrow,
    permutation,
    permuted,
    pieces,
    repeat_interleave,
    reshape,
    squeeze,
    swapped,
    unbind,
    unflatten,
    unsqueeze,
)

_UNARY = """
    abs neg exp log log2 log1p sqrt rsqrt square reciprocal sin cos tanh sigmoid erf relu sign floor ceil round
    clamp clip nan_to_num isnan isfinite isinf logical_not
"""
_BINARY = """
    add sub mul div true_divide floor_divide pow remainder maximum minimum where masked_fill lerp addcmul addcdiv
    eq ne lt le gt ge logical_and logical_or bitwise_and bitwise_or atan2 fmod subtract multiply divide
"""
_METHODS = """
    float double half bfloat16 clone contiguous bool int long type __add__ __radd__ __sub__ __rsub__
    __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    __and__ __or__ __invert__ __floordiv__ __mod__ cpu cuda
"""
_IN_PLACE = """
    add_ sub_ mul_ div_ pow_ clamp_ neg_ exp_ tanh_ relu_ sigmoid_ masked_fill_ copy_ zero_ fill_ __iadd__ __isub__
    __imul__ __itruediv__ sqrt_ rsqrt_ square_ abs_
"""
_ACTIVATIONS = "gelu silu relu elu selu leaky_relu softplus mish hardswish hardtanh relu6 celu logsigmoid softsign"
_FOREACH_OTHERS = ("_foreach_norm", "_foreach_max", "_foreach_powsum", "_foreach_mm")
_REDUCTIONS = "sum mean amax amin var std prod any all logsumexp argmax argmin max min sort"


def _functions(names: str, *homes: Any) -> list[Any]:
    found = [getattr(home, name) for name in names.split() for home in homes if hasattr(home, name)]
    return [function for function in found if callable(function)]


def table() -> dict[Any, Rule]:
    entries: dict[Any, Rule] = {}

    def enter(rule: Rule, *functions: Any) -> None:
        entries.update(dict.fromkeys(functions, rule))

    enter(elementwise, *_functions(_UNARY + _BINARY, torch, Tensor), *_functions(_METHODS, Tensor))
    enter(elementwise, *_functions(_ACTIVATIONS + " tanh sigmoid", F), torch.zeros_like, torch.ones_like)
    enter(elementwise, torch.empty_like, torch.full_like, torch.special.expit)
    enter(in_place, *_functions(_IN_PLACE, Tensor))
    enter(
        each,
        *(getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_") and name not in _FOREACH_OTHERS),
    )
    enter(data_of, DATA, Tensor.detach, torch.detach)
    enter(casting, Tensor.to, Tensor.type_as)
    enter(set_data, vars(torch._C.TensorBase)["data"].__set__)
    enter(dropping, F.dropout, torch.dropout, F.alpha_dropout)
    enter(drawing_like, torch.rand_like, torch.randn_like)
    enter(hooking, Tensor.register_hook)
    enter(reduction(1), *_functions(_REDUCTIONS, torch, Tensor))
    enter(reduction(2), *_functions("norm topk", torch, Tensor), torch.linalg.vector_norm)
    enter(along(1), torch.softmax, Tensor.softmax, F.softmax, torch.log_softmax, Tensor.log_softmax, F.log_softmax)
    enter(along(1), torch.cumsum, Tensor.cumsum)
    enter(along(2, 1), F.normalize)
    enter(normalization, F.layer_norm, *_functions("rms_norm", F, torch), torch.layer_norm)
    enter(reshape, Tensor.view, Tensor.reshape, torch.reshape)
    enter(like_other, Tensor.view_as, Tensor.reshape_as, Tensor.expand_as)
    enter(flatten, Tensor.flatten, torch.flatten)
    enter(unflatten, Tensor.unflatten, torch.unflatten)
    enter(permutation(swapped), *_functions("transpose swapaxes swapdims", torch, Tensor))
    enter(permutation(permuted), Tensor.permute, torch.permute)
    enter(permutation(last_two), getattr(Tensor, "mT").__get__)  # noqa: B009 (a descriptor)
    enter(expand, Tensor.expand)
    enter(unsqueeze, Tensor.unsqueeze, torch.unsqueeze)
    enter(squeeze, Tensor.squeeze, torch.squeeze)
    enter(getitem, Tensor.__getitem__)
    enter(narrow, Tensor.narrow, torch.narrow)
    enter(pieces(by_size), Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes)
    enter(pieces(by_number), Tensor.chunk, torch.chunk)
    enter(unbind, Tensor.unbind, torch.unbind)
    enter(joining, *_functions("cat concat concatenate", torch))
    enter(repeat_interleave, torch.repeat_interleave, Tensor.repeat_interleave)
    enter(matmul, *_functions("matmul bmm __matmul__", torch, Tensor))
    enter(linear, F.linear)
    enter(addmm, torch.addmm)
    enter(embedding, F.embedding)
    enter(attention, F.scaled_dot_product_attention)
    enter(loss, F.cross_entropy)
    enter(backward, torch.autograd.backward)
    enter(differentiate, torch.autograd.grad)
    enter(multi_head, F.multi_head_attention_forward)
    return entries
