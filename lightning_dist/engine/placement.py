"""Getting a module ready to be sharded: buffers on the device, and meta parameters given their initial values.

A module built on the meta device has shapes and no values. It gets those that one process would have drawn with the
same random state: modules are visited in the order in which they were registered, which is the order in which their
constructors drew, and each fills its own tensors by `reset_parameters` (PyTorch's convention). A Hugging Face
model draws through its own `init_weights` once all of it exists. What cannot be re-made, a buffer or a parameter of a
module without such a method, is refused by name: an uninitialized value would train silently.
"""

import torch
from torch import nn

from lightning_dist.core.errors import UnsupportedModelError


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers and metric states to `device`; parameters follow unit by unit when they are sharded."""
    for sub in module.modules():
        if next(sub.parameters(), None) is None and sub is not module:
            sub.to(device)
        for name, buffer in sub.named_buffers(recurse=False):
            if buffer.device.type != "meta":
                setattr(sub, name, buffer.to(device))


def materialize(module: nn.Module) -> None:
    """Give every meta tensor of `module` a place on the CPU and its initial values, in place.

    Raises:
        UnsupportedModelError: a tensor that no one knows how to initialize, by name.
    """
    if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        return
    pretrained = _hugging_face_models(module)
    theirs = {sub for model in pretrained for sub in model.modules()}
    for name, sub in module.named_modules():
        own = [t for t in (*sub.parameters(recurse=False), *sub.buffers(recurse=False)) if t is not None and t.is_meta]
        if not own:
            continue
        reset = getattr(sub, "reset_parameters", None) or getattr(sub, "_reset_parameters", None)
        if reset is None and sub not in theirs:
            raise UnsupportedModelError(
                f"{name or 'the module'} ({type(sub).__name__}) has {len(own)} tensors on the meta device and no "
                "reset_parameters() method that would fill them: give it one, or build this module on the CPU"
            )
        sub.to_empty(device="cpu", recurse=False)
        if reset is not None:
            reset()
    for model in pretrained:
        _fill_hugging_face(model)


def _hugging_face_models(module: nn.Module) -> list[nn.Module]:
    """Outermost modules that initialize themselves by transformers' `init_weights`."""
    if callable(getattr(module, "init_weights", None)) and callable(getattr(module, "_init_weights", None)):
        return [module]
    return [model for child in module.children() for model in _hugging_face_models(child)]


def _fill_hugging_face(model: nn.Module) -> None:
    for sub in model.modules():
        sub.__dict__.pop("_is_hf_initialized", None)
    for method in ("init_weights", "tie_weights"):
        getattr(model, method)()
