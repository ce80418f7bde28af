"""The stage view: the user's own step, run as one stage of the pipeline.

::

    training_step(batch)             stage 1 of 3, layers 4 to 7
      words(ids)          ahead      returns a fake at once
      layers 0-3          ahead      return fakes at once
      layer 4             entry      what came from stage 0 fills the fakes; from here on it is real
      layers 5-7          computed
      layer 8             exit       what it was about to be called with is handed over; the step ends there

A step is *rehearsed* once for each combination of shapes: with all parameters fake on every rank, up to the entry of
the last stage. That tells, without a word between the ranks, what travels at each entry (which leaves of the arguments
are fake there, their shapes, and whether a gradient comes back) and what the modules ahead of a stage return.

The step ends by an exception that is not an `Exception`, so ordinary handlers let it pass. Modules are seen by their
class: during a run, and only then, it is a subclass with another ``__call__``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lightning_dist.core.errors import UnsupportedModelError
from lightning_dist.pipeline.deferred import Deferred
from lightning_dist.pipeline.fakes import FakeParameters, Fakes, Filled, ValuesReadError, is_fake, origin_of
from lightning_dist.pipeline.homes import Stages, is_here
from lightning_dist.pipeline.side_doors import refuse_side_doors

Step = Callable[[], Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_ROLE = "_lightning_dist_role"


class StageDone(BaseException):
    """A stage has come to its last layer; not an `Exception`, so that user code lets it pass."""


class StepShapeError(UnsupportedModelError):
    """A step that does not pass the chain as a pipeline needs it."""


@dataclass(frozen=True)
class Leaf:
    """A tensor that travels: the number of the leaf among a layer's arguments, its shape and dtype (on meta)."""

    position: int
    like: Tensor
    needs_grad: bool


@dataclass
class Script:
    """What a rehearsal has found: what travels into each stage, and what the modules ahead of a stage return."""

    entries: dict[int, list[Leaf]] = field(default_factory=dict)  # by the number of the layer
    leaves: dict[int, int] = field(default_factory=dict)  # how many the arguments of that layer have
    layer_outputs: list[Any] = field(default_factory=list)
    outputs: dict[nn.Module, list[Any]] = field(default_factory=dict)  # of modules ahead, call by call
    checked: bool = False  # whether the loss was seen to come from the chain by its end alone


@dataclass
class Outcome:
    """What a run of a stage leaves: the tensors that travel on, or what the user's step returned."""

    travels: list[Tensor] | None
    returned: Any = None


class StageView:
    """Runs steps of `module` stage by stage.

    Args:
        module: the whole module; parameters of other stages may be absent.
        stages: see `Stages`.
        recompute: keep only the input of each layer for backward and compute the layer again there.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Stages,
        fakes: Fakes,
        *,
        recompute: bool = False,
    ) -> None:
        self.module, self.stages, self.fakes, self.recompute = module, stages, fakes, recompute
        self.names = {part: name or type(part).__name__ for name, part in module.named_modules()}
        self.ahead = list(_outermost_with_parameters(module, set(stages.chain.layers)))
        outside = {parameter for part in self.ahead for parameter in part.parameters()}
        self.inside = {
            parameter: f"{name}.{inner}"
            for name, layer in zip(stages.chain.names, stages.chain.layers, strict=True)
            for inner, parameter in layer.named_parameters()
            if parameter not in outside
        }
        self.entered: Callable[[], None] | None = None  # called when a run enters its first layer
        self.deferred: Deferred | None = None  # what takes over the weight gradients of a run

    # Rehearsal ------------------------------------------------------------------------------------------------

    def rehearse(self, step: Step) -> Script:
        """Run `step` with fakes to the entry of the last stage.

        Raises:
            UnsupportedModelError: it does not pass the chain in order, or reads values of parameters or layers.
        """
        script, chain = Script(), self.stages.chain
        starts = set(self.stages.bounds[1:-1])
        alike: dict[Any, Any] = {}

        def ahead(part: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
            output = self.fakes.label(call(*args, **kwargs), self.names[part])
            script.outputs.setdefault(part, []).append(self._replay_of(output, part))
            return output

        def layer(index: int, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
            self._insist_on_order(index, len(script.layer_outputs))
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
                output = alike[key] = self._try(chain.layers[index], args, kwargs, call)
            script.layer_outputs.append(self._replay_of(output, chain.layers[index]))
            return _fresh(output, self.fakes, self.names[chain.layers[index]])

        with torch.random.fork_rng(), _same_buffers_after(self.module), FakeParameters(self.module, self.fakes):
            done, _ = self._run(step, layer, ahead, nullcontext())
        if not done:
            last = len(self.stages.chain) - 1
            raise self._returned_early(len(script.layer_outputs), f"stage {self.stages.of_layer(last)} begins")
        return script

    def _try(self, layer: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """A fake output of a layer. One that looks at values (which expert gets which token) is shown zeros."""
        try:
            return call(*args, **kwargs)
        except ValuesReadError:
            fakes = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_fake(leaf)]
        trained = any(p.requires_grad for p in layer.parameters()) or any(fake.requires_grad for fake in fakes)
        values = {name: torch.zeros(p.shape, dtype=p.dtype, device=p.device) for name, p in layer.named_parameters()}
        args, kwargs = pytree.tree_map(_zeros_for_fakes, (args, kwargs))
        role = vars(layer)[_ROLE]
        vars(layer)[_ROLE] = lambda args, kwargs: call(*args, **kwargs)
        try:
            with torch.no_grad():
                output = torch.func.functional_call(layer, values, args, kwargs)
        finally:
            vars(layer)[_ROLE] = role
        grads = trained and torch.is_grad_enabled()
        return pytree.tree_map_only(
            Tensor,
            lambda t: self.fakes.like(t, self.names[layer], requires_grad=grads and t.is_floating_point()),
            output,
        )

    def _replay_of(self, output: Any, part: nn.Module) -> Any:
        """What a module may return in the place of being called again: its output, if that has no values at all."""
        if not _is_all_fake(output):
            return None
        return pytree.tree_map_only(Tensor, lambda tensor: self.fakes.like(tensor, self.names[part]), output)

    # Runs -----------------------------------------------------------------------------------------------------

    def run(self, stage: int, step: Step, script: Script, received: Sequence[Tensor]) -> Outcome:
        """Run `step` as one stage.

        Args:
            received: what came from the stage before, in the order of ``script.entries``.

        Raises:
            UnsupportedModelError: the step does not pass the chain in order, or needs what did not travel.
        """
        first, end, number = self.stages.bounds[stage], self.stages.bounds[stage + 1], len(self.stages.chain)
        calls: dict[nn.Module, int] = {}
        filled = Filled()
        expected = 0
        travels: list[Tensor] = []
        ends: list[Tensor] = []

        def ahead(part: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
            if stage == 0 or expected > first:
                if expected == number and stage > 0 and not is_here(part):
                    raise StepShapeError(
                        f"{self.names[part]}, which is computed ahead of the layers, was called behind them. "
                        + self._no_second_pass()
                        + f'. If it is meant to be used there: PipelineParallelStrategy(place={{"{self.names[part]}": '
                        '"both"})'
                    )
                return call(*args, **kwargs)
            count = calls[part] = calls.get(part, -1) + 1
            known = script.outputs.get(part, [])
            output = known[count] if count < len(known) else None
            return call(*args, **kwargs) if output is None else output

        def layer(index: int, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
            nonlocal expected
            self._insist_on_order(index, expected)
            expected += 1
            if index < first:
                output = script.layer_outputs[index]
                return call(*args, **kwargs) if output is None else output
            at_a_boundary = index == end or (index == first and stage > 0)
            if at_a_boundary or not (_has_no_fake(args) and _has_no_fake(tuple(kwargs.values()))):
                leaves, tree = pytree.tree_flatten((args, kwargs))
                if index == first and stage > 0:
                    self._check_count(index, script, leaves)
                    for leaf, tensor in zip(script.entries[index], received, strict=True):
                        filled.fill(leaves[leaf.position], tensor)
                        leaves[leaf.position] = tensor
                    if self.entered is not None:
                        self.entered()
                leaves = [self._real(filled.of(leaf), index) for leaf in leaves]
                if index == end:
                    self._check_count(index, script, leaves)
                    travels.extend(self._leaving(leaf, leaves, index) for leaf in script.entries[index])
                    raise StageDone
                args, kwargs = pytree.tree_unflatten(leaves, tree)
            filled.paused = True
            if self.recompute and torch.is_grad_enabled():
                args, kwargs = pytree.tree_map(_nothing_for_caches, (args, kwargs))
                output = checkpoint(call, *args, use_reentrant=False, context_fn=_again(self.deferred), **kwargs)
            else:
                output = call(*args, **kwargs)
            filled.paused = False
            self.fakes.behind = index == number - 1
            if index == number - 1:
                ends.extend(leaf for leaf in pytree.tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor))
            return output

        if stage == 0 and self.entered is not None:
            self.entered()
        done, returned = self._run(step, layer, ahead, nullcontext() if stage == 0 else filled)
        if done:
            return Outcome(travels)
        if end < number or expected < number:
            raise self._returned_early(expected, f"stage {stage} ends")
        if not script.checked:
            refuse_side_doors(returned, ends, self.inside)
            script.checked = True
        return Outcome(None, returned)

    def _returned_early(self, expected: int, comes: str) -> StepShapeError:
        chain = self.stages.chain
        return StepShapeError(
            f"the step returned before it called {chain.names[min(expected, len(chain) - 1)]}, and so before pipeline "
            f"{comes}. Every step must call all {len(chain)} layers of {chain.name}, each once and in order; if these "
            'are not the layers of this model, name them: PipelineParallelStrategy(layers="...")'
        )

    def _insist_on_order(self, index: int, expected: int) -> None:
        names = self.stages.chain.names
        if index == expected:
            return
        said = f"{names[index]} was called " + (
            "a second time in one step" if index < expected else f"before {names[expected]}"
        )
        raise StepShapeError(f"{said}. {self._no_second_pass()}")

    def _no_second_pass(self) -> str:
        chain = self.stages.chain
        return (
            f"Under a pipeline a step passes the {len(chain)} layers of {chain.name} once, in order: a second pass "
            "(model.generate, two forwards in one training_step, a shared encoder) would need the first stage again. "
            "Call generate and the like after training on a whole model: load the checkpoint, or copy.deepcopy(module) "
            "inside `with trainer.strategy.gathered(module):`. For two inputs, put them into one batch"
        )

    def _check_count(self, index: int, script: Script, leaves: Sequence[object]) -> None:
        if len(leaves) != script.leaves[index]:
            raise StepShapeError(
                f"{self.stages.chain.names[index]} was called with {len(leaves)} arguments in all, in the rehearsal "
                f"with {script.leaves[index]}: what a layer is called with must depend on the shapes of a batch alone"
            )

    def _real(self, leaf: Any, index: int) -> Any:
        if is_fake(leaf):
            raise UnsupportedModelError(
                f"{self.stages.chain.names[index]} reads {origin_of(leaf)}, which is computed on another pipeline "
                "stage and not among the arguments of the stage's first layer. Pass it to every layer, or compute it "
                'from the batch, or hold its module everywhere: PipelineParallelStrategy(place={"name": "every"})'
            )
        return leaf

    def _leaving(self, leaf: Leaf, leaves: Sequence[Any], index: int) -> Tensor:
        tensor = leaves[leaf.position]
        name = self.stages.chain.names[index]
        if not isinstance(tensor, Tensor):
            raise StepShapeError(
                f"argument {leaf.position} of {name} is a {type(tensor).__name__} here and a tensor in the rehearsal"
            )
        if tensor.shape != leaf.like.shape or tensor.dtype != leaf.like.dtype:
            raise StepShapeError(
                f"argument {leaf.position} of {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, but from the "
                f"shapes of the batch it should be {leaf.like.dtype} of shape {tuple(leaf.like.shape)}: under a "
                "pipeline shapes must not depend on the values in a batch. Pad instead of dropping tokens, for instance"
            )
        return tensor

    # Seeing the modules ---------------------------------------------------------------------------------------

    def _run(
        self,
        step: Step,
        layer: Callable[..., Any],
        ahead: Callable[..., Any],
        within: AbstractContextManager[object],
    ) -> tuple[bool, Any]:
        """Run `step` with these two in place of the modules' calls; whether it came to `StageDone`, else its value."""
        done = False

        def seen_layer(index: int, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
            nonlocal done
            try:
                return layer(index, args, kwargs, call)
            except StageDone:
                done = True
                raise

        self.fakes.active, self.fakes.behind = True, False
        try:
            with self._acting(seen_layer, ahead), within, nullcontext() if self.deferred is None else self.deferred:
                returned = step()
        except StageDone:
            return True, None
        finally:
            self.fakes.active = self.fakes.behind = False
        if done:
            raise StepShapeError(
                "the step caught the exception by which a pipeline stage ends a step (a bare `except:`, an `except "
                f"BaseException:` or a `return` in a `finally:` around {self.stages.chain.name}): catch Exception there"
            )
        return False, returned

    @contextmanager
    def _acting(self, layer: Callable[..., Any], ahead: Callable[..., Any]) -> Iterator[None]:
        acting: list[tuple[nn.Module, type[nn.Module]]] = []

        def act(part: nn.Module, play: Callable[..., Any], what: object) -> None:
            own = type(part)
            call = own.__call__.__get__(part)
            vars(part)[_ROLE] = lambda args, kwargs: play(what, args, kwargs, call)
            object.__setattr__(part, "__class__", _actor(own))  # type: ignore[arg-type]  # classes have a hash
            acting.append((part, own))

        try:
            for part in self.ahead:
                act(part, ahead, part)
            for index, part in enumerate(self.stages.chain.layers):
                act(part, layer, index)
            yield
        finally:
            for part, own in reversed(acting):
                object.__setattr__(part, "__class__", own)
                del vars(part)[_ROLE]


def _again(deferred: Deferred | None) -> Callable[[], tuple[Any, Any]]:
    """Contexts of a forward that is computed once more in backward: within what the first one was in."""
    return lambda: (nullcontext(), nullcontext() if deferred is None else deferred)


@contextmanager
def _same_buffers_after(module: nn.Module) -> Iterator[None]:
    """What the block writes to buffers (a count of batches seen, of batch statistics) is undone."""
    before = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, values in before:
                if buffer._version != version:
                    buffer.copy_(values)


@cache
def _actor(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a module while a stage runs: the same but for its call."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_ROLE](args, kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _outermost_with_parameters(module: nn.Module, layers: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules outside the chain that hold parameters; nothing inside of one of them again."""
    for child in module.children():
        if child in layers or not any(True for _ in child.parameters()):
            continue
        if layers.isdisjoint(child.modules()):
            yield child
        else:
            yield from _outermost_with_parameters(child, layers)


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


def _nothing_for_caches(leaf: object) -> object:
    """Keys and values that Hugging Face's layers append to a cache would be appended once more when recomputed."""
    kinds = type(leaf).__mro__
    return None if any(kind.__module__ == "transformers.cache_utils" for kind in kinds) else leaf


_SIMPLE = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device))


def _has_no_fake(values: tuple[Any, ...]) -> bool:
    """Whether that can be seen without a walk through all structures: for plain values, and tuples of them."""
    return all(type(v) in _SIMPLE or (type(v) is tuple and _has_no_fake(v)) for v in values)


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
