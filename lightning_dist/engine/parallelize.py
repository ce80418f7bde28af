"""`parallelize`: one module, all kinds of parallelism at once, in a plain PyTorch loop or under a Trainer.

The three engines below do not know each other. What makes them one is the order in which they take the module over,
and that each leaves parameter objects, names and (as far as user code can see) shapes as they were::

    1  stages     which layers this rank computes         parameters get a home (`pipeline.homes`)
    2  values     of what lives here, if it has none      the rest of a meta module is never made
    3  cuts       each matrix over the tp ranks           tp peers have the same stage, so they cut the same
    4  let go     of what lives on other stages
    5  shard      what is left, over the dp ranks         a fragment is a range of a part of what lives here

In a plain loop::

    mesh = Mesh.from_world(Layout(dp=2, tp=2, pp=2))
    parallel = parallelize(model, Plan(mesh.layout, zero=1, num_micro_batches=8), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    parallel.zero.adopt(optimizer)
    for batch in batches:                                        # the same on all ranks of a replica
        loss = parallel.forward_backward(lambda part: loss_of(model, part), batch)
        optimizer.step()
        optimizer.zero_grad()
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dist.comm.mesh import Mesh
from lightning_dist.core.errors import ConfigurationError
from lightning_dist.core.stages import Placement
from lightning_dist.engine.placement import materialize, place_buffers
from lightning_dist.engine.plan import Plan
from lightning_dist.pipeline import PipelineEngine, undivide
from lightning_dist.tensor import Report, cut_module, in_whole, uncut_module
from lightning_dist.zero import ZeroEngine
from lightning_dist.zero.refusals import refuse_unsupported


@dataclass(frozen=True)
class Parallel:
    """A module that was parallelized, with the engines that did it; see `parallelize`.

    Attributes:
        zero: holds the parameters; adopts optimizers, gathers values, knows gradients.
        pipeline: runs steps stage by stage; None where the plan has none.
        cuts: what tensor parallelism has cut, None where it cuts nothing.
    """

    module: nn.Module
    mesh: Mesh
    plan: Plan
    zero: ZeroEngine
    pipeline: PipelineEngine | None
    cuts: Report | None

    def forward_backward(self, step: Callable[[Any], Any], batch: Any, *, sync: bool = True) -> Any:
        """Run `step` on `batch`, forward and backward; gradients are averaged over the replicas. Collective.

        Args:
            step: takes a batch (in a pipeline, a micro-batch) and returns the loss, or a dict with it under "loss".
            sync: False for a batch of an accumulation that is followed by others; see `ZeroEngine.backward`.

        Returns:
            What `step` returned, in a pipeline merged over the micro-batches and the same on all ranks of the replica.
        """
        with self.zero.step():
            if self.pipeline is None:
                returned = step(batch)
                self.zero.backward(returned["loss"] if isinstance(returned, dict) else returned, sync=sync)
                return pytree.tree_map_only(Tensor, lambda tensor: in_whole(tensor).detach(), returned)
            with self.gradients_aside(), self.stage_gathered():
                result = self.pipeline.forward_backward(step, batch)
            self.hand_over(sync=sync)
            return result.returned

    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """A pipeline's step inside the block leaves its gradients aside, until `hand_over`."""
        with self.zero.aside.keep():
            yield

    def hand_over(self, *, sync: bool = True) -> None:
        """What lies aside counts as if a backward had just computed it, and is averaged over the replicas."""
        self.zero.backward(None, sync=sync, run=self.zero.aside.hand_over)

    @contextmanager
    def stage_gathered(self) -> Iterator[None]:
        """Under ZeRO-3 a stage's parameters are gathered once for all micro-batches of a step, not for each.

        Stages compute different things at a time, and a gather takes all ranks; gathering for every micro-batch would
        send the parameters as often. The price is the memory of one stage, until the end of the step.
        """
        if self.zero.row.parameter is Placement.SHARD and self.pipeline is not None:
            for unit in self.zero.units:
                self.zero.hold(unit)
        yield

    def remove(self) -> None:
        """Give the module back whole, with no hooks of ours. Collective."""
        self.zero.remove()
        undo(self.module, self.cuts)


def parallelize(module: nn.Module, plan: Plan, mesh: Mesh) -> Parallel:
    """Take `module` over in place, as `plan` says; see the module docstring for the order. Collective.

    Args:
        module: whole and the same on all ranks, with values or on the meta device.
        plan: its layout is that of the mesh.

    Raises:
        ConfigurationError: an argument that does not exist or does not fit.
        UnsupportedModelError: no plan, no chain of layers, or a parameter that cannot be sharded; by name.
    """
    if plan.layout != mesh.layout:
        raise ConfigurationError(f"the plan is for {plan.layout!r}, but the mesh has {mesh.layout!r}")
    cuts: Report | None = None

    def fill(here: Callable[[nn.Parameter], bool]) -> None:
        nonlocal cuts
        materialize(module, here)
        if mesh.tp.size > 1:
            cuts = cut_module(module, mesh.tp, plan=plan.tp_plan, sequence_parallel=plan.sequence_parallel)

    if not any(parameter.is_meta for parameter in module.parameters()):
        refuse_unsupported(module, mesh.device)  # while all values are here
    pipeline = None
    if plan.pipelined or (plan.pipelined is None and mesh.pp.size > 1):
        pipeline = PipelineEngine(
            module,
            mesh,
            num_micro_batches=plan.num_micro_batches,
            schedule=plan.schedule,
            virtual_stages=plan.virtual_stages,
            layers=plan.layers,
            split=plan.split,
            place=plan.place,
            recompute=plan.recompute,
            fill=fill,
            in_whole=in_whole,
            left=lambda: None if cuts is None else cuts.forget_inputs(),
        )
    else:
        fill(lambda _: True)
    place_buffers(module, mesh.device)
    zero = ZeroEngine(
        module,
        mesh,
        stage=plan.zero,
        compute_dtype=plan.compute_dtype,
        accumulate=plan.accumulate,
        prefetch_bytes=plan.prefetch_bytes,
    )
    return Parallel(module, mesh, plan, zero, pipeline, cuts)


def undo(module: nn.Module, cuts: Report | None) -> None:
    """Forget how a module was divided, once all of its values are back; also of a copy of one."""
    undivide(module)
    if cuts is not None:
        uncut_module(module, cuts)
