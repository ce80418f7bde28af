"""The stage view: the user's own step, run as one stage of the pipeline.

::

    training_step(batch)             stage 1 of 3, layers 4 to 7
      words(ids)          ahead      returns a fake at once
      layers 0-3          ahead      return fakes at once
      layer 4             entry      what came from stage 0 fills the fakes; from here on it is real
      layers 5-7          computed
      layer 8             exit       what it was about to be called with is handed over; the step ends there

What travels at an entry, and what the modules ahead return, a rehearsal has found (`rehearsal`). The step ends by an
exception that is not an `Exception`, so ordinary handlers let it pass.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lightning_dist.core.errors import UnsupportedModelError
from lightning_dist.pipeline.deferred import Deferred
from lightning_dist.pipeline.draws import Draws
from lightning_dist.pipeline.fakes import Fakes, Filled, as_computed, is_fake, origin_of
from lightning_dist.pipeline.homes import Stages, is_here
from lightning_dist.pipeline.micro_batches import tensors_in
from lightning_dist.pipeline.passage import Passage, StageDone, Step, StepShapeError, as_itself
from lightning_dist.pipeline.played import call_with_zeros, in_its_place, must_be_called, same_buffers_after, uncompiled
from lightning_dist.pipeline.rehearsal import UNSEEN, Leaf, Script, rehearse
from lightning_dist.pipeline.side_doors import refuse_side_doors


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
        left: see `Passage`.
        in_whole: puts a tensor together of which each rank of a stage holds a part; anything else stays as it is.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Stages,
        fakes: Fakes,
        *,
        recompute: bool = False,
        in_whole: Callable[[Any], Any] = lambda value: value,
        left: Callable[[], object] = lambda: None,
    ) -> None:
        self.stages, self.fakes, self.recompute, self.in_whole = stages, fakes, recompute, in_whole
        self.passage = Passage(module, stages, fakes, left=left)
        outside = {parameter for part in self.passage.ahead for parameter in part.parameters()}
        self.inside = {
            parameter: f"{name}.{inner}"
            for name, layer in zip(stages.chain.names, stages.chain.layers, strict=True)
            for inner, parameter in layer.named_parameters()
            if parameter not in outside
        }
        self.deferred: Deferred | None = None  # what takes over the weight gradients of a run

    def rehearse(self, step: Step, draws: Draws) -> Script:
        """See `rehearsal`."""
        return rehearse(self.passage, step, draws)

    def run(self, stage: int, step: Step, script: Script, received: Sequence[Tensor], draws: Draws) -> Outcome:
        """Run `step` as one stage.

        Args:
            received: what came from the stage before, in the order of ``script.entries``.
            draws: the random numbers of this micro-batch.

        Raises:
            UnsupportedModelError: the step does not pass the chain in order, or needs what did not travel.
        """
        first, end, number = self.stages.bounds[stage], self.stages.bounds[stage + 1], len(self.stages.chain)
        calls: dict[nn.Module, int] = {}
        filled = Filled()
        expected = 0
        travels: list[Tensor] = []
        ends: list[Tensor] = []
        learns = torch.is_grad_enabled()

        def ahead(part: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
            count = calls[part] = calls.get(part, -1) + 1
            computed = stage == 0 or expected > first
            if computed and expected == number and stage > 0 and not is_here(part):
                raise self._used_behind(self.passage.names[part])
            known = script.calls.get(part, [])
            seen = known[count] if count < len(known) else UNSEEN
            if computed:
                output = call(*args, **kwargs)
            elif seen.output is not None and not must_be_called(part, args, kwargs):
                output = seen.output
            else:
                with uncompiled():
                    output = self.fakes.label(call(*args, **kwargs), self.passage.names[part])
            if seen.draws and not filled.paused:
                draws.begin(self._stream_behind(part, count))
            return output

        def layer(index: int, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
            nonlocal expected
            self.passage.insist_on_order(index, expected)
            expected += 1
            if index < first:
                output = script.layer_outputs[index]
                if output is None or must_be_called(self.stages.chain.layers[index], args, kwargs):
                    output = self._call_with_fakes(index, script, args, kwargs, call)
                draws.begin(1 + index, plain=script.plain_draws)
                return output
            at_a_boundary = index == end or (index == first and stage > 0)
            if at_a_boundary or not (_has_no_fake(args) and _has_no_fake(tuple(kwargs.values()))):
                leaves = pytree.tree_leaves((args, kwargs))
                if at_a_boundary:
                    self._check_count(index, script, leaves)
                if index == first and stage > 0:
                    for leaf, tensor in zip(script.entries[index], received, strict=True):
                        filled.fill(leaves[leaf.position], as_computed(tensor))
                args, kwargs = in_its_place(lambda leaf: self._real(filled.of(leaf), index), (args, kwargs))
                if index == end:
                    leaves = pytree.tree_leaves((args, kwargs))
                    travels.extend(self._leaving(leaf, leaves, index, learns) for leaf in script.entries[index])
                    raise StageDone
            filled.paused = True
            if self.recompute and torch.is_grad_enabled():
                args, kwargs = pytree.tree_map(_nothing_for_caches, (args, kwargs))
                output = checkpoint(call, *args, use_reentrant=False, context_fn=_again(self.deferred), **kwargs)
            else:
                output = call(*args, **kwargs)
            filled.paused = False
            draws.begin(1 + index, plain=script.plain_draws)
            self.fakes.behind = index == number - 1
            if index == number - 1:
                ends.extend(leaf for leaf in pytree.tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor))
            return output

        contexts = [context for context in (filled if stage > 0 else None, self.deferred) if context is not None]
        draws.begin(0)
        with self.fakes.keeping_pace():
            done, returned = self.passage.run(step, layer, ahead, *contexts)
        if done:
            return Outcome(travels)
        if end < number or expected < number:
            raise self.passage.returned_early(expected, f"stage {stage} ends")
        returned = self._with_values(returned, filled)
        if not script.checked:
            refuse_side_doors(returned, ends, self.inside)
            script.checked = True
        return Outcome(None, returned)

    def _call_with_fakes(self, index: int, script: Script, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """What a layer of an earlier stage does when it is called, but for its computation."""
        layer, name = self.stages.chain.layers[index], self.stages.chain.names[index]
        with same_buffers_after(layer), uncompiled():
            if index in script.look_at_values:
                return call_with_zeros(self.fakes, layer, name, args, kwargs, as_itself)
            return self.fakes.label(call(*args, **kwargs), name)

    def _with_values(self, returned: Any, filled: Filled) -> Any:
        """What a step returned, as far as it has values."""
        returned = pytree.tree_map(lambda leaf: self.in_whole(filled.of(leaf)), returned)
        for path, tensor in tensors_in(returned, "what it returned"):
            if is_fake(tensor):
                raise UnsupportedModelError(
                    f"the step returned {origin_of(tensor)} ({path}), which has no values here: it is computed on "
                    "another pipeline stage, and from stage to stage travel only the arguments of the layers. Leave it "
                    "out of what is returned (output_hidden_states=False, for instance), or pass it through the layers"
                )
        return returned

    def _stream_behind(self, part: nn.Module, call: int) -> int:
        """A number of its own for each call of a module ahead; the layers have the first ones."""
        ahead = self.passage.ahead
        return 1 + len(self.stages.chain) + call * len(ahead) + ahead.index(part)

    def _used_behind(self, name: str) -> StepShapeError:
        return StepShapeError(
            f"{name}, which is computed ahead of the layers, was called behind them. {self.passage.no_second_pass()}. "
            f'If it is meant to be used there: PipelineParallelStrategy(place={{"{name}": "both"}})'
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

    def _leaving(self, leaf: Leaf, leaves: Sequence[Any], index: int, learns: bool) -> Tensor:
        tensor = self.in_whole(leaves[leaf.position])
        name = self.stages.chain.names[index]
        if not isinstance(tensor, Tensor):
            raise StepShapeError(
                f"argument {leaf.position} of {name} is a {type(tensor).__name__} here and a tensor in the rehearsal"
            )
        if learns and tensor.requires_grad != leaf.needs_grad:
            here, there = ("has a gradient", "none") if tensor.requires_grad else ("has no gradient", "one")
            raise StepShapeError(
                f"argument {leaf.position} of {name} {here} on pipeline stage {self.stages.of_layer(index) - 1}, but "
                f"{there} in the rehearsal: whether a layer stops the gradient must not depend on values, nor on the "
                "number of the layer"
            )
        if tensor.shape != leaf.like.shape or tensor.dtype != leaf.like.dtype:
            raise StepShapeError(
                f"argument {leaf.position} of {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, but from the "
                f"shapes of the batch it should be {leaf.like.dtype} of shape {tuple(leaf.like.shape)}: under a "
                "pipeline shapes must not depend on the values in a batch. Pad instead of dropping tokens, for instance"
            )
        return tensor


def _again(deferred: Deferred | None) -> Callable[[], tuple[Any, Any]]:
    """Contexts of a forward that is computed once more in backward: within what the first one was in."""
    return lambda: (nullcontext(), nullcontext()) if deferred is None else (deferred.computing(), deferred.again())


def _nothing_for_caches(leaf: object) -> object:
    """Keys and values that Hugging Face's layers append to a cache would be appended once more when recomputed."""
    kinds = type(leaf).__mro__
    return None if any(kind.__module__ == "transformers.cache_utils" for kind in kinds) else leaf


_SIMPLE = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device))


def _has_no_fake(values: tuple[Any, ...]) -> bool:
    """Whether that can be seen without a walk through all structures: for plain values, and tuples of them."""
    return all(type(v) in _SIMPLE or (type(v) is tuple and _has_no_fake(v)) for v in values)
