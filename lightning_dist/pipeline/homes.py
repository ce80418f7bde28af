"""Who holds what: a layer lives on its stage, what comes before the chain on the first, what comes after on the last.

Modules are met in the order in which they were registered, which is the order in which people write them down and
mostly that in which they run::

    words   blocks.0  blocks.1  ...  blocks.n-1   norm   head
    first   [stage 0]        ...     [stage S-1]  last   last

A parameter that is met in several places (tied words, a table that every layer reads) lives in all of them, and its
gradients are summed there. Parameters of the modules around the chain themselves (a `pos_embed` of the whole model) may
be used on either side and live on both ends. Where the order of registration misleads, `place` says better; a place
that is wrong is noticed in the first step, never computed with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lightning_dist.core.errors import ConfigurationError
from lightning_dist.core.shard import HOME, Home, home_of
from lightning_dist.pipeline.chain import Chain

PLACES = ("first", "last", "both", "every")


@dataclass(frozen=True)
class Stages:
    """The stages of a module: stage s computes layers [bounds[s], bounds[s+1]) of the chain on rank owners[s]."""

    chain: Chain
    bounds: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.owners)

    def layers(self, stage: int) -> range:
        """The layers of a stage, by number."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def of_layer(self, layer: int) -> int:
        """The stage of a layer."""
        return next(stage for stage in range(self.count) if layer in self.layers(stage))


def stages_by_module(
    module: nn.Module, stages: Stages, place: Mapping[str, str] | None = None
) -> dict[nn.Module, set[int]]:
    """For every module the stages that compute what it does itself (its parts may be elsewhere).

    Args:
        place: name patterns of modules outside the chain to "first", "last", "both" (ends) or "every" (stage).

    Raises:
        ConfigurationError: a pattern that matches nothing outside the chain, or a place that does not exist.
    """
    layer_of = {name: index for index, name in enumerate(stages.chain.names)}
    ends = {"first": {0}, "last": {stages.count - 1}, "both": {0, stages.count - 1}, "every": set(range(stages.count))}
    unused = _checked_places(place or {})
    found: dict[nn.Module, set[int]] = {}
    passed = False
    for name, part in module.named_modules(remove_duplicate=False):
        layer = next((layer_of[path] for path in _paths(name) if path in layer_of), None)
        if layer is not None:
            passed = True
            found.setdefault(part, set()).add(stages.of_layer(layer))
            continue
        prefix = f"{name}." if name else ""
        around = any(other.startswith(prefix) for other in stages.chain.names)
        where = ends["both" if around else "last" if passed else "first"]
        for pattern, said in (place or {}).items():
            if _matches(name, pattern) and not around:
                where = ends[said]
                unused.discard(pattern)
        found.setdefault(part, set()).update(where)
    if unused:
        raise ConfigurationError(
            f"place: {', '.join(sorted(unused))} matches no module outside of {stages.chain.name}; names are those of "
            "module.named_modules(), * stands for any part of a name"
        )
    return found


def _checked_places(place: Mapping[str, str]) -> set[str]:
    for pattern, said in place.items():
        if said not in PLACES:
            raise ConfigurationError(f'place: "{said}" (for {pattern}) does not exist; use {", ".join(PLACES)}')
    return set(place)


def _matches(name: str, pattern: str) -> bool:
    """The module itself and everything inside it."""
    return any(fnmatchcase(path, pattern) for path in _paths(name))


def _paths(name: str) -> list[str]:
    """The names of the modules that a module is in, and its own."""
    parts = name.split(".")
    return [".".join(parts[: k + 1]) for k in range(len(parts))]


def settle(module: nn.Module, stages: Stages, by_module: Mapping[nn.Module, set[int]], rank: int) -> None:
    """Note on every parameter and module which ranks hold it, as `core.shard.Home`; those that all hold go without."""
    everyone = set(stages.owners)
    by_parameter: dict[nn.Parameter, set[int]] = {}
    for part, where in by_module.items():
        ranks = {stages.owners[stage] for stage in where}
        if ranks != everyone:
            vars(part)[HOME] = Home(tuple(sorted(ranks)), rank)
        for parameter in part.parameters(recurse=False):
            by_parameter.setdefault(parameter, set()).update(ranks)
    for parameter, ranks in by_parameter.items():
        if ranks != everyone:
            vars(parameter)[HOME] = Home(tuple(sorted(ranks)), rank)


def unsettle(module: nn.Module) -> None:
    """Undo `settle`."""
    for part in module.modules():
        vars(part).pop(HOME, None)
        for parameter in part.parameters(recurse=False):
            vars(parameter).pop(HOME, None)


def is_here(thing: nn.Module | nn.Parameter) -> bool:
    """Whether this rank holds a parameter or computes a module."""
    home = home_of(thing)
    return home is None or home.here


def is_shared(parameter: nn.Parameter, num_ranks: int) -> bool:
    """Whether several ranks hold a parameter."""
    home = home_of(parameter)
    return (num_ranks if home is None else len(home.ranks)) > 1
