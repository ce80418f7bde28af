"""The chain: the repeated layers of a module, through which a hidden state passes once, in order.

    words -> [ layer 0 -> layer 1 -> ... -> layer n-1 ] -> norm -> head -> loss
              ^ the chain: cut between any two layers

Models tell where it is: they keep a list of equal layers. Of several such lists the one with the most parameters is
taken (the experts of a layer are inside it and hold less; of an encoder and a decoder the heavier one is cut, and the
other one stays whole before it). A module that is but an `nn.Sequential` is a chain of unlike layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_dist.core.errors import ConfigurationError, UnsupportedModelError


@dataclass(frozen=True)
class Chain:
    """The layers in order, with their full names. `name` says what they are a part of."""

    name: str
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)


def find_chain(module: nn.Module, layers: str | Sequence[str] | None = None) -> Chain:
    """The chain of `module`.

    Args:
        layers: the name of the module whose children are the layers ("model.layers"), or the names of the layers, in
            order; None to search.

    Raises:
        ConfigurationError: a name that does not exist or has no children, or a layer that is named twice.
        UnsupportedModelError: the module repeats no layer.
    """
    if layers is None:
        return _search(module)
    if not isinstance(layers, str):
        found = tuple(_get(module, name) for name in layers)
        return _checked(Chain("the layers given", tuple(layers), found))
    parent = _get(module, layers)
    children = tuple((name, child) for name, child in parent.named_children())
    if not children:
        raise ConfigurationError(
            f'layers="{layers}" is a {type(parent).__name__} without parts: name the list that holds the layers'
            + _suggestion(module)
        )
    return _checked(Chain(layers, tuple(f"{layers}.{n}" for n, _ in children), tuple(c for _, c in children)))


def _checked(chain: Chain) -> Chain:
    seen: dict[nn.Module, str] = {}
    for name, layer in zip(chain.names, chain.layers, strict=True):
        if layer in seen:
            raise ConfigurationError(
                f"{name} and {seen[layer]} are one module: a layer that is used twice cannot lie on two pipeline stages"
            )
        seen[layer] = name
    return chain


def _get(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        raise ConfigurationError(f'layers: the module has no part named "{name}"' + _suggestion(module)) from None


def _suggestion(module: nn.Module) -> str:
    names = [f'layers="{chain.name}" ({len(chain)} layers)' for chain in _candidates(module)]
    return f"; what repeats in it: {', '.join(names[:5])}" if names else ""


def _search(module: nn.Module) -> Chain:
    equal = [chain for chain in _candidates(module) if _are_equal(chain)]
    unlike = [chain for chain in _candidates(module) if not _are_equal(chain)]
    whole = _numel([module])
    for chains, least in ((equal, whole / 4), (unlike, whole / 2), (equal, 1)):
        largest = max(chains, key=lambda chain: _numel(chain.layers), default=None)
        if largest is not None and _numel(largest.layers) >= least:
            return _checked(largest)
    raise UnsupportedModelError(
        "no list of layers was found to make pipeline stages of: a pipeline divides an nn.ModuleList or nn.Sequential "
        f"of layers that are called one after the other. {type(module).__name__} has none with two or more layers; if "
        'its layers are separate attributes, name them in order: layers=["layer1", "layer2", ...]'
    )


def _candidates(module: nn.Module) -> Iterator[Chain]:
    """Lists of two or more parts that are called one after the other: equal ones, or any in an `nn.Sequential`."""
    for name, part in module.named_modules():
        if not isinstance(part, (nn.ModuleList, nn.Sequential)) or not any(True for _ in part.parameters()):
            continue
        children = [(n, c) for n, c in part.named_children()]
        chain = Chain(
            name or "(the module)", tuple(f"{name}.{n}".lstrip(".") for n, _ in children), tuple(c for _, c in children)
        )
        if len(chain) > 1 and (isinstance(part, nn.Sequential) or _are_equal(chain)):
            yield chain


def _are_equal(chain: Chain) -> bool:
    return len({type(layer) for layer in chain.layers}) == 1 and any(True for _ in chain.layers[0].parameters())


def _numel(modules: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
