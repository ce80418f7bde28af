"""Which parameters are gathered together: units, found without asking the user.

A unit is what one all-gather fetches. Too large, and much stays in memory at once; too small, and the network
only sees latency. Models tell where the seams are: they repeat a layer. So

1. every element of a list of equal layers (`nn.ModuleList`, `nn.Sequential`, or attributes of one class) is a unit;
   lists of unequal parts (an encoder and a decoder) are searched further inside;
2. a large embedding, linear or convolution outside of these (an embedding, a head) is a unit of its own;
3. the rest (final norms, small parameters) is the root unit, which is gathered for the whole step.

A parameter that appears at several places (tied weights) belongs to the unit that meets it first; the other
places are listed as further `callers`, so their forward gathers it too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from torch import nn

LEAF_UNITS: tuple[type[nn.Module], ...] = (
    nn.Embedding,
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose2d,
)
"""Modules that read their parameters in their own forward, so a hook on it is enough to gather in time."""

OPAQUE: tuple[type[nn.Module], ...] = (nn.MultiheadAttention,)
"""Modules whose children are never called: their forward hands the children's weights to a function."""

ROOT = "(root)"


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with all the names under which the module knows it; the first one is its own."""

    names: tuple[str, ...]
    parameter: nn.Parameter

    @property
    def name(self) -> str:
        """The name that checkpoints and messages use."""
        return self.names[0]


@dataclass(frozen=True)
class UnitPlan:
    """The parameters of a unit and the modules whose forward needs them."""

    name: str
    parameters: list[NamedParameter] = field(default_factory=list)
    callers: list[nn.Module] = field(default_factory=list)


def find_units(module: nn.Module) -> list[UnitPlan]:
    """Divide all parameters of `module` into units, the root first, then in the order of registration."""
    layers = dict(_layers(module, ""))
    inside = {sub for layer in layers.values() for sub in layer.modules()}
    sizes = [_numel(layer) for layer in layers.values()]
    least = median(sizes) / 2 if sizes else _numel(module) / 16
    heads = {name: leaf for name, leaf in _leaves(module, "") if leaf not in inside and _numel(leaf) >= max(least, 1)}
    order = {sub: i for i, sub in enumerate(module.modules())}
    plans = [UnitPlan(ROOT)]
    plans += [UnitPlan(n, callers=[m]) for n, m in sorted((layers | heads).items(), key=lambda item: order[item[1]])]
    _assign(module, plans)
    return [plan for plan in plans if plan.parameters]


def named_parameters(module: nn.Module) -> list[NamedParameter]:
    """All parameters, each once, with all of their names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [NamedParameter(tuple(n), parameter) for parameter, n in names.items()]


def _assign(module: nn.Module, plans: list[UnitPlan]) -> None:
    """Give each parameter to the first unit that meets it, and note further modules that use it."""
    home = {sub: plan for plan in plans for caller in plan.callers for sub in caller.modules()}
    known = {item.parameter: item for item in named_parameters(module)}
    owner: dict[nn.Parameter, UnitPlan] = {}
    for sub in module.modules():
        for parameter in sub.parameters(recurse=False):
            plan = owner.get(parameter)
            if plan is None:
                plan = owner[parameter] = home.get(sub, plans[0])
                plan.parameters.append(known[parameter])
            elif plan is not home.get(sub, plans[0]) and plan is not plans[0] and sub not in plan.callers:
                plan.callers.append(sub)


def _layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost repeated layers at or below `module`."""
    children = {name: child for name, child in module.named_children() if _numel(child)}
    a_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    kinds = [type(child) for child in children.values() if _has_children(child) or isinstance(module, nn.ModuleList)]
    equal = a_list and len(children) > 1 and len(kinds) == len(children) and len(set(kinds)) == 1
    for name, child in children.items():
        path = f"{prefix}{name}"
        if equal:
            yield path, child
            continue
        found = list(_layers(child, f"{path}."))
        if found:
            yield from found
        elif isinstance(module, nn.ModuleList) or (_has_children(child) and kinds.count(type(child)) > 1):
            yield path, child


def _leaves(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, LEAF_UNITS) or type(child).__name__ == "Conv1D":
            yield f"{prefix}{name}", child
        elif not isinstance(child, OPAQUE):
            yield from _leaves(child, f"{prefix}{name}.")


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
