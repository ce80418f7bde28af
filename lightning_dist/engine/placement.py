"""Getting a module ready to be sharded: buffers on the device, and meta parameters given their initial values.

A module built on the meta device has shapes and no values. It gets those that one process would have drawn with the
same random state: modules are filled children first, in the order in which they were registered, which is the order in
which their constructors drew, by `reset_parameters` (PyTorch's convention). A Hugging Face model draws once more
through its own `init_weights` when all of it exists, as its constructor does. What cannot be re-made, a buffer or a
parameter of a module without such a method, is refused by name: an uninitialized value would train silently.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist.core.errors import UnsupportedModelError
from lightning_dist.core.shard import HOME


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers and metric states to `device`; parameters follow unit by unit when they are sharded."""
    for sub in module.modules():
        if next(sub.parameters(), None) is None and sub is not module:
            sub.to(device)
        for name, buffer in sub.named_buffers(recurse=False):
            if buffer.device.type != "meta":
                setattr(sub, name, buffer.to(device))


def _draw_conv1d(module: nn.Module) -> None:
    """The constructor of transformers' Conv1D (GPT-2's linear) draws in place of having `reset_parameters`."""
    nn.init.normal_(_of(module, "weight"), std=0.02)
    nn.init.zeros_(_of(module, "bias"))


def materialize(module: nn.Module, here: Callable[[nn.Parameter], bool] = lambda _: True) -> None:
    """Give every meta tensor of `module` a place on the CPU and its initial values, in place. Tied tensors stay tied.

    Args:
        here: which parameters are wanted; the others stay on the meta device. The random numbers of all are drawn.

    Raises:
        UnsupportedModelError: a tensor that no one knows how to initialize, by name.
    """
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        with _DrawForMeta():  # type: ignore[no-untyped-call]
            _fill(module, "", {}, here, hugging_face=False)


class _DrawForMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Drawing into a tensor without values uses up as many random numbers as if it had some.

    So what is drawn after it is the same whether or not it exists. The numbers exist for a moment, tensor by tensor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _DRAWS and args[0].is_meta:
            func(torch.empty_like(args[0], device="cpu"), *args[1:], **(kwargs or {}))
            return args[0]
        return func(*args, **(kwargs or {}))


_DRAWS = {
    getattr(torch.ops.aten, name)
    for name in ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_")
}


def _fill(
    module: nn.Module,
    name: str,
    made: dict[Tensor, Tensor],
    here: Callable[[nn.Parameter], bool],
    *,
    hugging_face: bool,
) -> None:
    """Fill a module's children, then itself. `made` maps meta tensors to what has taken their place."""
    is_model = callable(getattr(module, "init_weights", None)) and callable(getattr(module, "_init_weights", None))
    for child_name, child in module.named_children():
        _fill(child, f"{name}.{child_name}".lstrip("."), made, here, hugging_face=hugging_face or is_model)
    own = {n: t for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None and t.is_meta}
    if own:
        _fill_own(module, name, own, made, here, hugging_face=hugging_face or is_model)
    if is_model:
        getattr(module, "init_weights")()  # noqa: B009 (not every module has it)


def _fill_own(
    module: nn.Module,
    name: str,
    own: dict[str, Tensor],
    made: dict[Tensor, Tensor],
    here: Callable[[nn.Parameter], bool],
    *,
    hugging_face: bool,
) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None and type(module).__name__ == "Conv1D":
        reset = partial(_draw_conv1d, module)
    if reset is None and not hugging_face:
        raise UnsupportedModelError(
            f"{name or 'the module'} ({type(module).__name__}) has {len(own)} tensors on the meta device and no "
            "reset_parameters() method that would fill them: give it one, or build this module on the CPU"
        )
    own = {key: tensor for key, tensor in own.items() if not isinstance(tensor, nn.Parameter) or here(tensor)}
    for key, tensor in own.items():
        _put(module, key, _empty_like(tensor))
    if reset is not None:
        reset()
    for key, tensor in own.items():
        if tensor in made and not hugging_face:  # tied: the first one's values count, as when one process ties them
            _put(module, key, made[tensor])
        made.setdefault(tensor, _of(module, key))


def _empty_like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="cpu")
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    vars(parameter).update({key: note for key, note in vars(tensor).items() if key == HOME})
    return parameter


def _of(module: nn.Module, key: str) -> Tensor:
    parameter, buffer = module._parameters.get(key), module._buffers.get(key)
    tensor = buffer if parameter is None else parameter
    assert tensor is not None
    return tensor


def _put(module: nn.Module, key: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        module._parameters[key] = tensor
    else:
        module._buffers[key] = tensor
