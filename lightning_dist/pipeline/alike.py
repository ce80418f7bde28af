"""Which calls of layers are alike, so that a rehearsal need make but one of them.

Layers of one class may still differ: in a stride, in a flag that stops the gradient. So they count as alike where all
that they hold is equal, down to the plain attributes of the modules inside; what cannot be compared must be the same
object. Only their own number, by the names under which layers keep it, may differ. Where a layer makes more of that
number than a place in a cache, its real output is not what the rehearsal said, and `view` refuses it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_OF_ALL_MODULES = frozenset((*vars(nn.Module()), "_apply")) - {"training"}  # the last is ours, to guard copies
_THEIR_NUMBER = frozenset(("layer_idx", "layer_index", "layer_id", "layer_number", "block_idx", "block_id"))
_PLAIN = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def signature_of_call(layer: nn.Module, kind: type[nn.Module], args: Any, kwargs: Any) -> object:
    """Calls with equal signatures have outputs of equal shapes, with equal need of gradients.

    Args:
        kind: the layer's own class.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device)
    return kind, _held(layer, kind), tuple(map(_said, leaves)), str(tree), modes


def _held(layer: nn.Module, kind: type[nn.Module]) -> object:
    return tuple(
        (
            name,
            kind if part is layer else type(part),
            tuple((key, _said(tensor)) for key, tensor in (*part._parameters.items(), *part._buffers.items())),
            tuple((key, _value(value)) for key, value in sorted(vars(part).items()) if _tells(key)),
        )
        for name, part in layer.named_modules()
    )


def _tells(name: str) -> bool:
    return name not in _OF_ALL_MODULES | _THEIR_NUMBER and not name.startswith(("_lightning_dist", "__"))


def _said(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def _value(value: object) -> object:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_value, value))
    if type(value) is dict:
        return tuple((str(key), _value(item)) for key, item in value.items())
    return _said(value) if isinstance(value, Tensor) else id(value)
