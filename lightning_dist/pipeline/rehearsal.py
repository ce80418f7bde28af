"""The rehearsal: what travels between the stages, found without a word between the ranks.

A step is run once for each combination of shapes, with all parameters fake on every rank alike, up to the entry of the
last stage. At the entry of each stage exactly those leaves of the arguments are fake that must come from the stage
before; their shapes are known, and whether a gradient comes back. What modules ahead of a stage return is kept for its
runs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dist.pipeline.attributes import same_attributes_after
from lightning_dist.pipeline.draws import Draws, Watch, same_numbers_after
from lightning_dist.pipeline.fakes import FakeParameters, Fakes, ValuesReadError, is_fake
from lightning_dist.pipeline.passage import Passage, StageDone, Step, as_itself


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
        key = _signature_of_call(chain.layers[index], args, kwargs)
        output = alike.get(key)
        if output is None or not _is_all_fake(output):
            watch = Watch(generators)
            output = alike[key] = _try(passage, chain.layers[index], args, kwargs, call)
            script.plain_draws |= watch.plain
        script.layer_outputs.append(_replay_of(output, passage, chain.layers[index]))
        return _fresh(output, passage.fakes, passage.names[chain.layers[index]])

    with ExitStack() as stack:
        stack.enter_context(same_numbers_after(generators))
        stack.enter_context(_same_buffers_after(passage.module))
        stack.enter_context(same_attributes_after(passage.module.modules()))
        stack.enter_context(FakeParameters(passage.module, passage.fakes))
        draws.begin(0)
        done, _ = passage.run(step, layer, ahead)
    if not done:
        last = len(passage.stages.chain) - 1
        raise passage.returned_early(len(script.layer_outputs), f"stage {passage.stages.of_layer(last)} begins")
    return script


def _try(passage: Passage, layer: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
    """A fake output of a layer. One that looks at values (which expert gets which token) is shown zeros."""
    try:
        return call(*args, **kwargs)
    except ValuesReadError:
        fakes = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_fake(leaf)]
    trained = any(p.requires_grad for p in layer.parameters()) or any(fake.requires_grad for fake in fakes)
    values = {name: torch.zeros(p.shape, dtype=p.dtype, device=p.device) for name, p in layer.named_parameters()}
    args, kwargs = pytree.tree_map(_zeros_for_fakes, (args, kwargs))
    with as_itself(layer, call), torch.no_grad():
        output = torch.func.functional_call(layer, values, args, kwargs)
    grads = trained and torch.is_grad_enabled()
    return pytree.tree_map_only(
        Tensor,
        lambda t: passage.fakes.like(t, passage.names[layer], requires_grad=grads and t.is_floating_point()),
        output,
    )


def _replay_of(output: Any, passage: Passage, part: nn.Module) -> Any:
    """What a module may return in the place of being called again: its output, if that has no values at all."""
    if not _is_all_fake(output):
        return None
    return pytree.tree_map_only(Tensor, lambda tensor: passage.fakes.like(tensor, passage.names[part]), output)


@contextmanager
def _same_buffers_after(module: nn.Module) -> Iterator[None]:
    """What the block writes to buffers or puts in their place (a count of batches, batch statistics) is undone."""
    before = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers()]
    places = [(part._buffers, dict(part._buffers)) for part in module.modules() if part._buffers]
    try:
        yield
    finally:
        for buffers, held in places:
            buffers.update(held)
        with torch.no_grad():
            for buffer, version, values in before:
                if buffer._version != version or not torch.equal(buffer, values):  # norms write without counting it
                    buffer.copy_(values)


def _fresh(value: Any, fakes: Fakes, origin: str) -> Any:
    """New fakes like those in a structure, with the same need of gradients."""
    return pytree.tree_map_only(
        Tensor, lambda t: fakes.like(t, origin, requires_grad=t.requires_grad) if is_fake(t) else t, value
    )


def _zeros_for_fakes(leaf: object) -> object:
    """Zeros for a fake; nothing for objects such as a cache, in which the first attempt may have left fakes."""
    if isinstance(leaf, Tensor):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if is_fake(leaf) else leaf
    plain = isinstance(leaf, (int, float, str, torch.dtype, torch.device, type(None), type(Ellipsis)))
    return leaf if plain or callable(leaf) else None


def _is_all_fake(value: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(map(is_fake, tensors))


def _signature_of_call(layer: nn.Module, args: Any, kwargs: Any) -> object:
    """Calls with equal signatures have outputs of equal shapes."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    said = tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else _plain(leaf)
        for leaf in leaves
    )
    held = tuple((name, tuple(p.shape), p.requires_grad) for name, p in layer.named_parameters())
    return type(layer).__mro__[1], held, said, str(tree)


def _plain(leaf: object) -> object:
    return leaf if isinstance(leaf, (int, float, bool, str, type(None))) else type(leaf)
