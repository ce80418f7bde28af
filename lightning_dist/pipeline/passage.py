"""How a step passes the layers, as a pipeline sees it: every call of a layer, or of a module ahead of them, is played.

Modules are seen by their class: while a step runs, and only then, it is a subclass with another ``__call__``. Hooks
could not do this, which see a call but cannot take its place; a replaced attribute would be copied and pickled along.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from lightning_dist.core.errors import UnsupportedModelError
from lightning_dist.pipeline.fakes import Fakes
from lightning_dist.pipeline.homes import Stages

Step = Callable[[], Any]
Play = Callable[..., Any]
"""What is done in the place of a call: takes the layer's number (or the module), its arguments, and the call itself."""

_ROLE = "_lightning_dist_role"
_ACTS = "_lightning_dist_acts"


class StageDone(BaseException):
    """A stage has come to its last layer; not an `Exception`, so that user code lets it pass."""


class StepShapeError(UnsupportedModelError):
    """A step that does not pass the chain as a pipeline needs it."""


class Passage:
    """The layers of `module` and what is ahead of them; `names` are for messages.

    Args:
        left: called when a run is over. Most runs are left in the midst of a forward, by an exception that modules'
            forward hooks do not see.
    """

    def __init__(
        self, module: nn.Module, stages: Stages, fakes: Fakes, *, left: Callable[[], object] = lambda: None
    ) -> None:
        self.left = left
        self.module, self.stages, self.fakes = module, stages, fakes
        self.names = {part: name or type(part).__name__ for name, part in module.named_modules()}
        self.ahead = list(_outermost_with_parameters(module, set(stages.chain.layers)))

    def run(
        self,
        step: Step,
        layer: Play,
        ahead: Play,
        *within: AbstractContextManager[object],
    ) -> tuple[bool, Any]:
        """Run `step` with these two in place of the modules' calls; whether it came to `StageDone`, else its value.

        Args:
            within: contexts of the step.

        Raises:
            StepShapeError: it caught what ends it.
        """
        done, learns = False, torch.is_grad_enabled()

        def seen_layer(index: int, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
            nonlocal done
            if learns and _is_in_a_checkpoint(sys._getframe()):
                raise self._checkpointed_from_outside(index)
            try:
                return layer(index, args, kwargs, call)
            except StageDone:
                done = True
                raise

        self.fakes.active, self.fakes.behind = True, False
        try:
            with ExitStack() as stack:
                for context in (self._acting(seen_layer, ahead), *within):
                    stack.enter_context(context)
                returned = step()
        except StageDone:
            return True, None
        finally:
            self.fakes.active = self.fakes.behind = False
            self.left()
        if done:
            raise StepShapeError(
                "the step caught the exception by which a pipeline stage ends a step (a bare `except:`, an `except "
                f"BaseException:` or a `return` in a `finally:` around {self.stages.chain.name}): catch Exception there"
            )
        return False, returned

    @contextmanager
    def _acting(self, layer: Play, ahead: Play) -> Iterator[None]:
        acting: list[tuple[nn.Module, type[nn.Module]]] = []

        def act(part: nn.Module, play: Callable[..., Any], what: object) -> None:
            own = type(part)

            def call(*args: Any, **kwargs: Any) -> Any:
                with as_itself(part):
                    return part(*args, **kwargs)

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

    # What is wrong with a step ---------------------------------------------------------------------------------

    def returned_early(self, expected: int, comes: str) -> StepShapeError:
        chain = self.stages.chain
        return StepShapeError(
            f"the step returned before it called {chain.names[min(expected, len(chain) - 1)]}, and so before pipeline "
            f"{comes}. Every step must call all {len(chain)} layers of {chain.name}, each once and in order; if these "
            'are not the layers of this model, name them: PipelineParallelStrategy(layers="...")'
        )

    def insist_on_order(self, index: int, expected: int) -> None:
        names = self.stages.chain.names
        if index == expected:
            return
        said = f"{names[index]} was called " + (
            "a second time in one step" if index < expected else f"before {names[expected]}"
        )
        raise StepShapeError(f"{said}. {self.no_second_pass()}")

    def _checkpointed_from_outside(self, index: int) -> StepShapeError:
        return StepShapeError(
            f"{self.stages.chain.names[index]} is called inside torch.utils.checkpoint, which would call it once more "
            "in backward, when this pipeline stage has gone on to other micro-batches. Call the layers without it, and "
            'have them computed again by the pipeline: PipelineParallelStrategy(recompute="full"); a checkpoint inside '
            "of a layer is right too"
        )

    def no_second_pass(self) -> str:
        chain = self.stages.chain
        return (
            f"Under a pipeline a step passes the {len(chain)} layers of {chain.name} once, in order: a second pass "
            "(model.generate, two forwards in one training_step, a shared encoder) would need the first stage again. "
            "Call generate and the like after training on a whole model: load the checkpoint, or copy.deepcopy(module) "
            "inside `with trainer.strategy.gathered(module):`. For two inputs, put them into one batch"
        )


def _is_in_a_checkpoint(frame: FrameType | None) -> bool:
    """Whether a call was made by `torch.utils.checkpoint`, inside the step: one kind of it shows in no other way."""
    while frame is not None and frame.f_code is not Passage.run.__code__:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


@contextmanager
def as_itself(part: nn.Module) -> Iterator[None]:
    """Within the block a module is of its own class, which its code may ask for, and calls of it are not played."""
    seen_as = type(part)
    object.__setattr__(part, "__class__", own_class(part))
    try:
        yield
    finally:
        object.__setattr__(part, "__class__", seen_as)


def own_class(part: nn.Module) -> type[nn.Module]:
    """The class of a module as its writer knows it."""
    kind = type(part)
    return kind.__bases__[0] if _ACTS in vars(kind) else kind


class _NotSaid(nn.Module):
    """Stands before a class, so that its `__init_subclass__` does not hear of another one."""

    def __init_subclass__(cls) -> None:
        pass


@cache
def _actor(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a module while a stage runs: the same but for its call."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_ROLE](args, kwargs)

    inside: dict[str, Any] = {"__call__": call, "__module__": kind.__module__, _ACTS: True}
    make: Callable[..., type[nn.Module]] = type(kind)
    actor = make(kind.__name__, (_NotSaid, kind), inside)
    actor.__bases__ = (kind,)
    return actor


def _outermost_with_parameters(module: nn.Module, layers: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules outside the chain that hold parameters; nothing inside of one of them again."""
    for child in module.children():
        if child in layers or not any(True for _ in child.parameters()):
            continue
        if layers.isdisjoint(child.modules()):
            yield child
        else:
            yield from _outermost_with_parameters(child, layers)
