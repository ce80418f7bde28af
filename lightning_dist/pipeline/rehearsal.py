"""The rehearsal: what travels between the stages, found without a word between the ranks.

A step is run once for each combination of shapes, with all parameters fake on every rank alike, up to the entry of the
last stage. At the entry of each stage exactly those leaves of the arguments are fake that must come from the stage
before; their shapes are known, and whether a gradient comes back. What modules ahead of a stage return is kept for its
runs.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dist.pipeline.alike import signature_of_call
from lightning_dist.pipeline.attributes import same_attributes_after
from lightning_dist.pipeline.draws import Draws, Watch, same_numbers_after
from lightning_dist.pipeline.fakes import FakeParameters, Fakes, ValuesReadError, as_computed, is_fake
from lightning_dist.pipeline.passage import Passage, StageDone, Step, as_itself, own_class
from lightning_dist.pipeline.played import call_with_zeros, must_be_called, same_buffers_after, uncompiled


@dataclass(frozen=True)
class Leaf:
    """A tensor that travels: the number of the leaf among a layer's arguments, its shape and dtype (on meta)."""

    position: int
    like: Tensor
    needs_grad: bool


@dataclass(frozen=True)
class Call:
    """A call of a module ahead: what may be returned in its place, if anything, and whether it draws random numbers."""

    output: Any
    draws: bool


UNSEEN = Call(None, draws=False)
"""A call behind the layers, which is computed as it comes."""


@dataclass
class Script:
    """What a rehearsal has found: what travels into each stage, and what the modules ahead of a stage return."""

    entries: dict[int, list[Leaf]] = field(default_factory=dict)  # by the number of the layer
    leaves: dict[int, int] = field(default_factory=dict)  # how many the arguments of that layer have
    layer_outputs: list[Any] = field(default_factory=list)
    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)  # of modules ahead
    plain_draws: bool = False  # whether a layer draws random numbers of numpy or `random`
    look_at_values: set[int] = field(default_factory=set)  # layers
    checked: bool = False  # whether the loss was seen to come from the chain by its end alone


def rehearse(passage: Passage, step: Step, draws: Draws) -> Script:
    """Run `step` with fakes to the entry of the last stage.

    Raises:
        UnsupportedModelError: it does not pass the chain in order, or reads values of parameters or layers.
    """
    script, chain = Script(), passage.stages.chain
    starts = set(passage.stages.bounds[1:-1])
    alike: dict[Any, Any] = {}
    generators = [generator for generator, _ in draws.seeds]

    def ahead(part: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        watch, drawn = Watch(generators), passage.fakes.drawn
        output = passage.fakes.label(call(*args, **kwargs), passage.names[part])
        said = Call(_replay_of(output, passage, part), draws=watch.any or passage.fakes.drawn > drawn)
        script.calls.setdefault(part, []).append(said)
        return output

    def layer(index: int, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        passage.insist_on_order(index, len(script.layer_outputs))
        if index in starts:
            leaves = pytree.tree_leaves((args, kwargs))
            script.leaves[index] = len(leaves)
            script.entries[index] = [
                Leaf(position, torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), leaf.requires_grad)
                for position, leaf in enumerate(leaves)
                if is_fake(leaf)
            ]
            if index == max(starts):
                raise StageDone
        script.layer_outputs.append(None)
        part, name = chain.layers[index], chain.names[index]
        alone = must_be_called(part, args, kwargs)
        key = None if alone else signature_of_call(part, own_class(part), args, kwargs)
        known = alike.get(key)
        if known is not None:
            output, looks = _fresh(known[0], passage.fakes, name), known[1]
        else:
            watch = Watch(generators)
            output, looks = _try(passage, index, args, kwargs, call)
            script.plain_draws |= watch.plain
            if not alone and _is_all_fake(output):
                alike[key] = _fresh(output, passage.fakes, name), looks
        if looks:
            script.look_at_values.add(index)
        script.layer_outputs[index] = _replay_of(output, passage, part)
        return output

    with ExitStack() as stack:
        stack.enter_context(same_numbers_after(generators))
        stack.enter_context(same_buffers_after(passage.module))
        stack.enter_context(same_attributes_after(passage.module.modules()))
        stack.enter_context(uncompiled())
        stack.enter_context(FakeParameters(passage.module, passage.fakes))
        draws.begin(0)
        done, _ = passage.run(step, layer, ahead)
    if not done:
        last = len(passage.stages.chain) - 1
        raise passage.returned_early(len(script.layer_outputs), f"stage {passage.stages.of_layer(last)} begins")
    return script


def _try(passage: Passage, index: int, args: Any, kwargs: Any, call: Callable[..., Any]) -> tuple[Any, bool]:
    """A fake output of a layer, and whether it looks at values."""
    layer, name = passage.stages.chain.layers[index], passage.stages.chain.names[index]
    try:
        return passage.fakes.label(call(*args, **kwargs), name), False
    except ValuesReadError:
        return call_with_zeros(passage.fakes, layer, name, args, kwargs, as_itself), True


def _replay_of(output: Any, passage: Passage, part: nn.Module) -> Any:
    """What a module may return in the place of being called again: its output, if that has no values at all."""
    if not _is_all_fake(output):
        return None
    return pytree.tree_map_only(Tensor, lambda tensor: passage.fakes.like(tensor, passage.names[part]), output)


def _fresh(value: Any, fakes: Fakes, origin: str) -> Any:
    """New fakes like those in a structure, with the same need of gradients."""
    return pytree.tree_map_only(
        Tensor, lambda t: as_computed(fakes.like(t, origin, requires_grad=t.requires_grad)) if is_fake(t) else t, value
    )


def _is_all_fake(value: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(map(is_fake, tensors))
