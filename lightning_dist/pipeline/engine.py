"""The pipeline engine: an unmodified module, divided over the ranks of the `pp` axis.

GPipe (Huang et al. 2019, arXiv 1811.06965) and what came after it, as schedules (`schedule`). Every rank runs the
user's own step on every micro-batch, as the stages that it holds (`view`); what travels are the arguments of the first
layer of the next stage, and their gradients back.

In a plain loop::

    mesh = Mesh.from_world(Layout(pp=world_size))
    engine = PipelineEngine(model, mesh, num_micro_batches=8)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if engine.is_here(p)])
    for batch in batches:
        loss = engine.forward_backward(lambda part: loss_of(model, part), batch).returned     # the same on every rank
        optimizer.step()
        optimizer.zero_grad()
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dist.comm.mesh import Mesh
from lightning_dist.comm.rollcall import Place
from lightning_dist.core.errors import ConfigurationError
from lightning_dist.pipeline import absent, homes
from lightning_dist.pipeline.chain import find_chain
from lightning_dist.pipeline.draws import Draws, draws_of_step, generators_of, same_numbers_after
from lightning_dist.pipeline.executor import Executor, Work
from lightning_dist.pipeline.fakes import Fakes
from lightning_dist.pipeline.homes import Stages, stages_by_module
from lightning_dist.pipeline.micro_batches import count_samples, merge, signature, split_batch
from lightning_dist.pipeline.partition import balance, better_split, bounds_of, estimated_costs
from lightning_dist.pipeline.program import Programs
from lightning_dist.pipeline.rehearsal import Script
from lightning_dist.pipeline.report import WORTH_SAYING, PipelineReport
from lightning_dist.pipeline.schedule import SCHEDULES, Schedule, Shape, Timeline, schedule_row
from lightning_dist.pipeline.shared_parameters import summed_over_homes
from lightning_dist.pipeline.view import StageView

MICRO_BATCHES_PER_RANK = 4
"""Micro-batches for each rank, where nobody says how many: a bubble of a quarter at most."""

NO_MEETING = (
    "in a step under a pipeline ranks cannot communicate: each comes by at another time, and most end the step before "
    "what comes after the layers. Log with self.log(..., sync_dist=True), which waits for the end of the step, or keep "
    "the value in an attribute of the module and communicate where the step is over, in on_train_batch_end or "
    "on_validation_epoch_end, say"
)

UserStep = Callable[[Any], Any]
Traceless = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Result:
    """A step's outcome, the same on all ranks: what the user's steps returned, merged, and what went with it."""

    returned: Any
    shared: Any = None


class PipelineEngine:
    """Divides `module` in place over the `pp` axis of `mesh`; all ranks construct it alike.

    Args:
        module: any module that passes a chain of layers once in a step; the same on all ranks.
        num_micro_batches: parts of a batch; by default four for each rank.
        schedule: a name ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv"), a file, or a schedule.
        virtual_stages: stages on each rank, for "interleaved".
        layers: where the chain is; see `find_chain`.
        split: the number of layers of each stage; by default balanced by estimated cost.
        place: which stages hold modules outside the chain; see `homes`.
        recompute: keep only the input of each layer for backward.
        fill: called when it is known which parameters live here (those for which its argument is true) and before the
            others are let go: to give values to those on the meta device, or to divide parameters in other ways.
        in_whole, left: see `StageView`.

    Raises:
        ConfigurationError: an argument that does not exist or does not fit; fewer layers than stages.
        UnsupportedModelError: no chain was found.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        num_micro_batches: int | None = None,
        schedule: str | Path | Schedule = "1f1b",
        virtual_stages: int | None = None,
        layers: str | Sequence[str] | None = None,
        split: Sequence[int] | None = None,
        place: Mapping[str, str] | None = None,
        recompute: bool = False,
        fill: Callable[[Callable[[nn.Parameter], bool]], object] | None = None,
        in_whole: Callable[[Any], Any] = lambda value: value,
        left: Callable[[], object] = lambda: None,
    ) -> None:
        self.module, self.mesh = module, mesh
        pp = mesh.pp
        self.programs = Programs(schedule, pp.size, virtual_stages)
        self.num_micro_batches = num_micro_batches or self.programs.fixed or MICRO_BATCHES_PER_RANK * pp.size
        if self.num_micro_batches < 1:
            raise ConfigurationError(f"num_micro_batches={num_micro_batches} is not a number of parts; use 1 or more")
        chain = find_chain(module, layers)
        if split is None:
            whole = Stages(chain, (0, len(chain)), (0,))
            after = [part for part, where in self._after(whole, place) if where]
            costs, first, last = estimated_costs(module, chain, after=after)
            split = balance(costs, self.programs.num_stages, first=first, last=last)
        self.stages = Stages(chain, bounds_of(split, chain, self.programs.num_stages), self.programs.owners)
        by_module = stages_by_module(module, self.stages, place)
        homes.settle(module, self.stages, by_module, pp.rank)
        if fill is not None:
            fill(homes.is_here)
        self.fakes = Fakes()
        self.freed = absent.let_go(module, self.fakes)
        self.view = StageView(module, self.stages, self.fakes, recompute=recompute, in_whole=in_whole, left=left)
        self.executor = Executor(self.view, pp.rank, pp.mail)
        self.shared = [p for p in module.parameters() if homes.is_here(p) and homes.is_shared(p, pp.size)]
        seen = {part for whole in (*self.view.passage.ahead, *chain.layers) for part in whole.modules()}
        self.run_by_all_stages = {name: part for name, part in module.named_modules() if part not in seen}
        self._scripts: dict[object, Script] = {}

    def _after(self, whole: Stages, place: Mapping[str, str] | None) -> Iterable[tuple[nn.Module, bool]]:
        """Modules outside the chain, and whether they come after it."""
        probe = Stages(whole.chain, (0, max(len(whole.chain) // 2, 1), len(whole.chain)), (0, 1))
        for part, where in stages_by_module(self.module, probe, place).items():
            yield part, where == {1} and not _inside(part, whole)

    @staticmethod
    def is_here(parameter: nn.Parameter) -> bool:
        """Whether this rank holds a parameter."""
        return homes.is_here(parameter)

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the last stage, and with it the loss."""
        return self.stages.owners[-1] == self.mesh.pp.rank

    # Steps ----------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        step: UserStep,
        batch: Any,
        *,
        scale: float | Tensor = 1.0,
        weigh: Callable[[Any], float | Tensor] | None = None,
        split: Callable[[Any, int], Sequence[Any]] | None = None,
        share: Callable[[Sequence[float]], Any] | None = None,
        without_traces: Traceless = nullcontext,
    ) -> Result:
        """Run `step` on the micro-batches of `batch`, forward and backward; collective along the axis.

        Gradients of ``scale * sum_k w_k loss_k`` are added to the parameters' `grad`, where w_k is the weight of a
        micro-batch over that of all.

        Args:
            step: takes a micro-batch and returns the loss, or a dict with it under "loss".
            weigh: what a micro-batch counts for; by default its number of samples.
            split: divides a batch; by default `split_batch`.
            share: called on the rank of the last stage after the step, with the micro-batches' shares of the whole
                weight; what it returns is the same on all ranks.
            without_traces: a context within which `step` is run where its end is not reached: to see shapes, and on the
                rank of the last stage as the earlier ones that it holds. What such a run does outside of the
                parameters must not count.
        """
        return self._step(step, batch, scale, weigh, split, share, without_traces, training=True)

    def forward(
        self,
        step: UserStep,
        batch: Any,
        *,
        weigh: Callable[[Any], float | Tensor] | None = None,
        split: Callable[[Any, int], Sequence[Any]] | None = None,
        share: Callable[[Sequence[float]], Any] | None = None,
        without_traces: Traceless = nullcontext,
    ) -> Result:
        """Run `step` on the micro-batches of `batch` without a backward; see `forward_backward`."""
        return self._step(step, batch, 1.0, weigh, split, share, without_traces, training=False)

    def _step(
        self,
        step: UserStep,
        batch: Any,
        scale: float | Tensor,
        weigh: Callable[[Any], float | Tensor] | None,
        split: Callable[[Any, int], Sequence[Any]] | None,
        share: Callable[[Sequence[float]], Any] | None,
        without_traces: Traceless,
        *,
        training: bool,
    ) -> Result:
        parts = list((split or split_batch)(batch, self.num_micro_batches))
        weighed = [float((weigh or count_samples)(part)) for part in parts]
        total = sum(weighed)
        others_learn = total == 0 and float(scale) == 0  # other replicas, from their parts of the batch
        if not total > 0 and not others_learn:
            raise ConfigurationError(
                f"the micro-batches of a batch weigh {weighed}, nothing in all: loss_weight must be positive for every "
                "batch"
            )
        shares = [weight / (total or 1.0) for weight in weighed]
        generators = generators_of(self.run_by_all_stages.values())
        draws = draws_of_step(generators, len(parts))
        trained = hash(tuple(parameter.requires_grad for parameter in self.module.parameters()))
        with self.mesh.rollcall.closing(NO_MEETING if self.mesh.pp.size > 1 else ""):
            works = [
                Work(
                    _bind(step, part),
                    self._script(step, part, numbers, without_traces, trained, training=training),
                    scale * part_share if part_share else 0.0,
                    numbers,
                )
                for part, part_share, numbers in zip(parts, shares, draws, strict=True)
            ]
            program = self.programs.of(len(parts), training=training)[self.mesh.pp.rank]
            with same_numbers_after(generators), summed_over_homes(self.shared if training else (), self.mesh.pp):
                returned = self.executor.run(program, works, training=training, without_traces=without_traces)
        if not self.is_last:
            return self._told()
        sizes = [count_samples(part) if split is None else 1 for part in parts]
        result = Result(merge(_without_history(returned), sizes, shares), share(shares) if share is not None else None)
        return self._tell(result)

    def _script(
        self, step: UserStep, part: Any, draws: Draws, without_traces: Traceless, trained: int, *, training: bool
    ) -> Script:
        if self.stages.count == 1:
            return Script()
        key = signature(part), training, self.module.training, trained, torch.is_grad_enabled()
        if key not in self._scripts:
            with torch.set_grad_enabled(training), without_traces():
                self._scripts[key] = self.view.rehearse(_bind(step, part), draws)
        return self._scripts[key]

    def _tell(self, result: Result) -> Result:
        pp = self.mesh.pp
        if pp.size > 1:
            assert pp.mail is not None
            on_cpu = pytree.tree_map_only(Tensor, lambda t: t.cpu(), (result.returned, result.shared))
            for peer in range(pp.size):
                if peer != pp.rank:
                    pp.mail.send_object(on_cpu, peer)
        return result

    def _told(self) -> Result:
        pp = self.mesh.pp
        assert pp.mail is not None
        heard = pp.mail.receive_object(self.stages.owners[-1])
        assert isinstance(heard, tuple)
        return Result(*pytree.tree_map_only(Tensor, lambda t: t.to(self.mesh.device), heard))

    # For people -----------------------------------------------------------------------------------------------

    def words(self) -> str:
        """How the module is divided, in a line."""
        stages = self.stages
        sizes = "+".join(str(len(stages.layers(stage))) for stage in range(stages.count))
        share = self._expected_bubble_share(self.num_micro_batches)
        return (
            f"{self.programs.name}, {self.num_micro_batches} micro-batches; {stages.count} stages of {sizes} layers of "
            f"{stages.chain.name}" + ("" if share is None else f"; bubble {share:.0%} of the time by formula")
        )

    def report(self) -> PipelineReport:
        """The last step's timeline and what follows from it; collective over the world."""
        self.mesh.rollcall.call(Place.AGREE, what="on the timeline of the last step")
        everyone = self.mesh.rollcall.exchange(self.executor.stopwatch.spans())
        timeline = Timeline([everyone[rank] for rank in self.mesh.pp.ranks])  # type: ignore[misc]
        numbers = {span.action.micro_batch for spans in timeline.spans for span in spans}
        split = [len(self.stages.layers(stage)) for stage in range(self.stages.count)]
        better, gain = better_split(timeline.stage_busy, split)
        return PipelineReport(
            timeline,
            self.programs.name,
            self._expected_bubble_share(len(numbers)) if numbers else None,
            tuple(split),
            tuple(better) if gain > WORTH_SAYING else None,
            gain,
        )

    def _expected_bubble_share(self, num_micro_batches: int) -> float | None:
        if self.programs.name not in SCHEDULES:
            return None
        shape = Shape(self.mesh.pp.size, num_micro_batches, self.stages.count // self.mesh.pp.size)
        return schedule_row(self.programs.name).bubble_share(shape)


def undivide(module: nn.Module) -> None:
    """Forget how a module was divided; to be called when all values are back."""
    absent.take_back(module)
    homes.unsettle(module)


def _bind(step: UserStep, part: Any) -> Callable[[], Any]:
    return lambda: step(part)


def _inside(part: nn.Module, stages: Stages) -> bool:
    return any(part in layer.modules() for layer in stages.chain.layers)


def _without_history(returned: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.Tensor.detach, returned)
