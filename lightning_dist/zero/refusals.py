"""What cannot be sharded, refused by name before anything is touched."""

import torch
from torch import nn

from lightning_dist.comm.agreement import DIFFERENT_MODELS, insist_on_equal
from lightning_dist.comm.rollcall import RollCall
from lightning_dist.core.errors import UnsupportedModelError
from lightning_dist.params.questions import in_words, without_answers


def insist_on_equal_modules(module: nn.Module, rollcall: RollCall) -> None:
    """All ranks must have built the same module: names, shapes, dtypes and what is trained; collective.

    Raises:
        RankMismatchError: they have not; the message names the first difference.
    """
    insist_on_equal([in_words(n, p) for n, p in module.named_parameters()], rollcall, DIFFERENT_MODELS)


def refuse_unsupported(module: nn.Module, device: torch.device) -> None:
    """Refuse, by name, what cannot be sharded.

    Raises:
        UnsupportedModelError: see its message.
    """
    for name, sub in module.named_modules():
        if getattr(sub, "sparse", False) and isinstance(sub, (nn.Embedding, nn.EmbeddingBag)):
            raise UnsupportedModelError(f"{name}: sparse gradients cannot be reduced in flat buffers; use sparse=False")
    for name, parameter in module.named_parameters():
        reason = _unsupported(parameter, device)
        if reason:
            raise UnsupportedModelError(f"parameter {name} {reason}")
    _refuse_shared_storage(module)


def _refuse_shared_storage(module: nn.Module) -> None:
    """What lies over the same memory is tied in one process and would come apart in flat buffers."""
    pieces = [(without_answers(p).detach(), name) for name, p in module.named_parameters()]
    spans = sorted((p.data_ptr(), p.numel() * p.element_size(), name) for p, name in pieces)
    end, last = 0, ""
    for start, size, name in spans:
        if size and start < end:
            raise UnsupportedModelError(
                f"parameters {last} and {name} share memory without being the same parameter: tie them by assigning "
                "the parameter itself (`b.weight = a.weight`)"
            )
        if size:
            end, last = start + size, name
    for name, buffer in module.named_buffers():
        low, high = buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.element_size()
        for start, size, other in spans:
            if start < high and low < start + size:
                raise UnsupportedModelError(
                    f"buffer {name} shares memory with parameter {other}, from which sharding would part it: give it "
                    "a copy (`.clone()`), or read the parameter in its place"
                )


def _unsupported(parameter: nn.Parameter, device: torch.device) -> str | None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        return "is not initialized yet: run one batch through lazy modules before training"
    if parameter.device.type == "meta":
        return "is on the meta device and has no values; build it on the CPU or let the strategy materialize it"
    if not parameter.dtype.is_floating_point:
        return (
            f"is of dtype {parameter.dtype}, which cannot be cut into fragments for an optimizer; make it a buffer, "
            'or use strategy="zero0"'
        )
    if parameter.device.type != "cpu" and parameter.device != device:
        return f"is on {parameter.device}, but this rank computes on {device}; move the whole module there"
    if parameter.layout is not torch.strided:
        return f"has layout {parameter.layout}; use a dense parameter"
    if _overlaps_itself(parameter):
        return (
            f"has several elements over one place in memory (shape {tuple(parameter.shape)}, strides "
            f"{parameter.stride()}), as after expand(): make it nn.Parameter(values.clone()), or expand it in forward"
        )
    if parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"is of dtype {parameter.dtype}; quantized weights cannot be sharded"
    return None


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices lead to one element; strides of dims that do not nest count as such."""
    reach = 1
    for stride, size in sorted((st, s) for st, s in zip(tensor.stride(), tensor.shape, strict=True) if s != 1):
        if stride < reach:
            return tensor.numel() > 0
        reach = stride * (size - 1) + reach
    return False
