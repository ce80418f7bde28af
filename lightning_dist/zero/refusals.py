"""What cannot be sharded, refused by name before anything is touched."""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor, nn

from lightning_dist.comm.agreement import DIFFERENT_MODELS, insist_on_equal
from lightning_dist.comm.rollcall import RollCall
from lightning_dist.core.errors import UnsupportedModelError
from lightning_dist.core.shard import home_of
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
    for name, parameter in _held(module):
        reason = _unsupported(parameter, device)
        if reason:
            raise UnsupportedModelError(f"parameter {name} {reason}")
    _refuse_shared_storage(module)


def _held(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters whose values are here, where a pipeline has put some on other ranks."""
    homes = [(name, parameter, home_of(parameter)) for name, parameter in module.named_parameters()]
    return [(name, parameter) for name, parameter, home in homes if home is None or home.here]


def _refuse_shared_storage(module: nn.Module) -> None:
    """What lies over the same memory is tied in one process and would come apart in flat buffers."""
    parameters = [_Stretch(n, without_answers(p).detach()) for n, p in _held(module)]
    buffers = [_Stretch(n, b, is_buffer=True) for n, b in module.named_buffers() if b.layout is torch.strided]
    for stretches in _touching([s for s in (*parameters, *buffers) if s.tensor.numel()]):
        if shared := _first_shared(stretches):
            first, second = shared
            raise UnsupportedModelError(
                f"buffer {second.name} shares memory with parameter {first.name}, from which sharding would part it: "
                "give it a copy (`.clone()`), or read the parameter in its place"
                if second.is_buffer
                else f"parameters {first.name} and {second.name} share memory without being the same parameter: tie "
                "them by assigning the parameter itself (`b.weight = a.weight`)"
            )


@dataclass(frozen=True)
class _Stretch:
    """The memory from the first to the last byte of a tensor, which need not hold all of it (`matrix[:, ::2]`)."""

    name: str
    tensor: Tensor
    is_buffer: bool = False

    @property
    def start(self) -> int:
        return self.tensor.data_ptr()

    @property
    def stop(self) -> int:
        reach = sum((size - 1) * stride for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        return self.start + (reach + 1) * self.tensor.element_size()


def _touching(stretches: list[_Stretch]) -> list[list[_Stretch]]:
    """Those that reach into each other, together."""
    together: list[list[_Stretch]] = []
    end = -1
    for stretch in sorted(stretches, key=lambda s: s.start):
        if stretch.start >= end:
            together.append([])
        together[-1].append(stretch)
        end = max(end, stretch.stop)
    return together


def _first_shared(stretches: list[_Stretch]) -> tuple[_Stretch, _Stretch] | None:
    """A parameter and what lies over one of its elements: found by marking the places that each one holds."""
    if len(stretches) == 1 or all(stretch.is_buffer for stretch in stretches):
        return None
    low, high = min(s.start for s in stretches), max(s.stop for s in stretches)
    unit = gcd(*(s.start - low for s in stretches), *(s.tensor.element_size() for s in stretches))  # bytes of a place
    marks = torch.zeros((high - low) // unit, dtype=torch.int32)  # 0, or the number of the parameter that lies here
    ordered = sorted(stretches, key=lambda s: s.is_buffer)  # buffers may share with each other, so they mark nothing
    for number, stretch in enumerate(ordered, 1):
        places = stretch.tensor.element_size() // unit
        strides = (*(stride * places for stride in stretch.tensor.stride()), 1)
        held = marks.as_strided((*stretch.tensor.shape, places), strides, (stretch.start - low) // unit)
        if earlier := int(held.max()):
            return ordered[earlier - 1], stretch
        if not stretch.is_buffer:
            held.fill_(number)
    return None


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
