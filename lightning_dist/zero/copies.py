"""Copying, pickling and converting a module that is sharded.

Its hooks belong to the engine, its parameters are views of buffers or away. So ``copy.deepcopy`` makes a plain module
without our hooks, where the values are there; pickling, which would write buffers and hooks, is refused; and
``module.to(...)`` passes where it changes nothing for parameters and is refused where it would.

The three are found as attributes of the *instance*, which is where `copy`, `pickle` and `nn.Module` look first: the
module's class stays what it is.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_dist.core.errors import LightningDistError
from lightning_dist.params.hooks import ModuleHook
from lightning_dist.zero import guard

_NAMES = ("__deepcopy__", "__reduce_ex__", "_apply")
_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}
_WHOLE = "save `strategy.full_state_dict()` (or trainer.save_checkpoint), called on all ranks"


def install(module: nn.Module) -> None:
    """Prepare every module that holds parameters, or has children that do."""
    for sub in module.modules():
        if next(sub.parameters(), None) is None:
            continue
        vars(sub)["__deepcopy__"] = _Copy(sub)
        vars(sub)["__reduce_ex__"] = _refuse_pickling
        vars(sub)["_apply"] = _Convert(sub)


def uninstall(module: nn.Module) -> None:
    """Undo `install`."""
    for sub in module.modules():
        for name in _NAMES:
            if _is_ours(vars(sub).get(name)):
                del vars(sub)[name]


def _is_ours(attribute: object) -> bool:
    return isinstance(attribute, (_Copy, _Convert)) or attribute is _refuse_pickling


def _refuse_pickling(protocol: int) -> NoReturn:
    raise LightningDistError(
        f"a sharded module cannot be pickled (torch.save, pickle, multiprocessing): {_WHOLE}. For a plain module take "
        "copy.deepcopy(module) inside `with strategy.gathered(module):` and pickle that"
    )


class _Copy:
    """`copy.deepcopy` of a sharded module: an independent one with parameters and hooks of its own."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        if any(isinstance(parameter, guard.ReleasedParameter) for parameter in self.module.parameters()):
            raise LightningDistError(
                "copy.deepcopy of a module whose values rest sharded: copy it inside `with "
                f"strategy.gathered(module):` on all ranks, or {_WHOLE}"
            )
        with _bare(self.module):
            return copy.deepcopy(self.module, memo)


@contextmanager
def _bare(module: nn.Module) -> Iterator[None]:
    """Take what the engine has put there out of the module's attributes, for as long as it is copied."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for sub in module.modules():
        attributes = vars(sub)
        changed = {name: attributes.pop(name) for name in _NAMES if _is_ours(attributes.get(name))}
        for hooks, companions in _HOOKS.items():
            ours = {key for key, hook in attributes[hooks].items() if isinstance(hook, ModuleHook)}
            for name in (hooks, *companions):
                changed[name] = attributes[name]
                attributes[name] = OrderedDict((k, v) for k, v in attributes[name].items() if k not in ours)
        kept.append((attributes, changed))
    try:
        yield
    finally:
        for attributes, changed in kept:
            attributes.update(changed)


class _Convert:
    """`nn.Module._apply`, on which `to`, `half`, `cpu`, ... rest: for buffers only, if parameters stay as they are."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with torch.no_grad():
            for name, parameter in self.module.named_parameters(recurse=recurse):
                self._insist_on_no_change(fn, name, parameter)
            if recurse:
                for child in self.module.children():
                    child._apply(fn)  # type: ignore[no-untyped-call]
            for key, buffer in self.module._buffers.items():
                if buffer is not None:
                    self.module._buffers[key] = fn(buffer)
        return self.module

    def _insist_on_no_change(self, fn: Callable[[Tensor], Tensor], name: str, parameter: nn.Parameter) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            sample = torch.empty((2,) * parameter.ndim, dtype=parameter.dtype, device=parameter.device)
        result = fn(sample)
        if (result.dtype, result.device) != (sample.dtype, sample.device) or not result.is_contiguous():
            what = f"{result.dtype} on {result.device}" + ("" if result.is_contiguous() else ", not contiguous")
            raise LightningDistError(
                f"a sharded module cannot be converted: {name} is {sample.dtype} on {sample.device} and would become "
                f"{what}. Dtype and device are fixed from setup on: choose Trainer(precision=..., accelerator=...), or "
                "convert a copy: copy.deepcopy(module) inside `with strategy.gathered(module):`"
            )
