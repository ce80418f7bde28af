"""The executor: one loop over a rank's actions, whatever the schedule.

::

    RECV_F    post the receive of a stage's input           SEND_F    send its output on
    F         run the user's step as this stage             B         backward through it; or
    RECV_B    post the receive of the output's gradient     I, W      input gradients, weight gradients
    SEND_B    send the input's gradient back                UNSHARD, RESHARD, REDUCE   whoever registered for them

Between a forward and its backward a *flight* is kept: the stage's inputs, and the place in the graph where the
gradients of its outputs enter. The outputs themselves are free once they are sent.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_dist.comm.mail import Letter, Mail
from lightning_dist.core.errors import ConfigurationError
from lightning_dist.pipeline.deferred import Deferred
from lightning_dist.pipeline.draws import Draws
from lightning_dist.pipeline.homes import Stages
from lightning_dist.pipeline.passage import Step
from lightning_dist.pipeline.rehearsal import Script
from lightning_dist.pipeline.schedule import Action, Kind
from lightning_dist.pipeline.stopwatch import Stopwatch
from lightning_dist.pipeline.view import StageView

Place = tuple[int, int]
"""Stage and micro-batch."""


@dataclass(frozen=True)
class Work:
    """One micro-batch of a step.

    Attributes:
        step: the user's step on it.
        script: what its shapes mean for the stages.
        weight: what its loss counts for, loss scale included.
        draws: its random numbers; the same on all ranks.
    """

    step: Step
    script: Script
    weight: float | Tensor
    draws: Draws


@dataclass
class Flight:
    """What a forward leaves for its backward."""

    received: list[Tensor]
    edges: list[GradientEdge]
    deferred: Deferred | None
    outputs: list[Tensor] = field(default_factory=list)  # until they are sent; of a loss, what it weighs
    input_gradients: list[Tensor] = field(default_factory=list)  # until they are sent


class Executor:
    """Carries out the actions of one rank.

    Args:
        hooks: what to call at UNSHARD, RESHARD and REDUCE, with the number of the stage.
    """

    def __init__(
        self,
        view: StageView,
        rank: int,
        mail: Mail | None,
        hooks: Mapping[Kind, Callable[[int], None]] | None = None,
    ) -> None:
        self.view, self.rank, self.mail = view, rank, mail
        self.hooks = dict(hooks or {})
        self.stopwatch = Stopwatch()
        self.peak_live = 0
        self._act: dict[Kind, Callable[[int, int], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRAD: self._backward,
            Kind.WEIGHT_GRAD: self._weight_gradients,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECV_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECV_BACKWARD: self._receive_backward,
        }

    @property
    def stages(self) -> Stages:
        """How the module is divided."""
        return self.view.stages

    def run(
        self,
        actions: Sequence[Action],
        works: Sequence[Work],
        *,
        training: bool,
        without_traces: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> list[Any]:
        """Carry out a step; what the user's step returned for each micro-batch, where the last stage is, else nothing.

        Gradients are added to the parameters' `grad`.

        Args:
            without_traces: a context for runs of earlier stages on the rank of the last, in which alone what a step
                leaves in the module counts.
        """
        self.works, self.training = works, training
        self.without_traces = without_traces if self._is_mine(self.stages.count - 1) else nullcontext
        self.returned: dict[int, Any] = {}
        self.flights: dict[Place, Flight] = {}
        self.inbox: dict[tuple[Kind, int, int], Letter | list[Tensor]] = {}
        self.splits = any(action.kind is Kind.INPUT_GRAD for action in actions)
        self.peak_live = 0
        self.stopwatch.restart()
        for action in actions:
            if action.micro_batch is None:
                if handler := self.hooks.get(action.kind):
                    handler(action.stage)
                continue
            self._act[action.kind](action.stage, action.micro_batch)
        if self.mail is not None:
            self.mail.flush()
        returned = [self.returned[number] for number in sorted(self.returned)]
        self.flights.clear()
        self.returned.clear()
        self.works = ()
        return returned

    # Computing ------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, number: int) -> None:
        work, first = self.works[number], self.stages.bounds[stage]
        received: list[Tensor] = []
        if stage > 0:
            arrived = self._take(Kind.RECV_FORWARD, stage, number)
            for tensor, leaf in zip(arrived, work.script.entries[first], strict=True):
                received.append(tensor.requires_grad_(leaf.needs_grad and self.training))
        flight = Flight(received, [], Deferred() if self.splits else None)
        self.view.deferred = flight.deferred
        with self.stopwatch.span(Action(Kind.FORWARD, stage, number)), torch.set_grad_enabled(self.training):
            with self.without_traces() if stage < self.stages.count - 1 else nullcontext():
                outcome = self.view.run(stage, work.step, work.script, received, work.draws)
            if outcome.travels is None:
                self.returned[number] = outcome.returned
                loss = loss_of(outcome.returned) if self.training else None
                if loss is not None and not _is_zero(work.weight):
                    flight.edges.append(get_gradient_edge(loss))
                    weight = torch.as_tensor(work.weight, dtype=loss.dtype, device=loss.device)
                    flight.outputs = [weight.expand(loss.shape)]
            else:
                leaves = work.script.entries[self.stages.bounds[stage + 1]]
                flight.outputs = [tensor.detach() for tensor in outcome.travels]
                if self.training:
                    flight.edges = [
                        get_gradient_edge(tensor)
                        for tensor, leaf in zip(outcome.travels, leaves, strict=True)
                        if leaf.needs_grad
                    ]
        self.flights[stage, number] = flight
        self.peak_live = max(self.peak_live, len(self.flights))
        if not self.training:
            flight.received = []
        if stage < self.stages.count - 1 and self._is_mine(stage + 1):
            self.inbox[Kind.RECV_FORWARD, stage + 1, number] = [tensor.clone() for tensor in flight.outputs]
            flight.outputs = []
        if not self.training and (stage == self.stages.count - 1 or not flight.outputs):
            del self.flights[stage, number]

    def _backward(self, stage: int, number: int) -> None:
        flight = self.flights[stage, number]
        if stage == self.stages.count - 1:
            gradients = flight.outputs
        else:
            gradients = self._take(Kind.RECV_BACKWARD, stage, number)
        kind = Kind.BACKWARD if flight.deferred is None else Kind.INPUT_GRAD
        with self.stopwatch.span(Action(kind, stage, number)):
            if flight.edges:
                torch.autograd.backward(flight.edges, gradients)
        flight.edges = []
        flight.input_gradients = [_gradient(tensor) for tensor in flight.received if tensor.requires_grad]
        flight.received = []
        leaves = stage > 0 and not self._is_mine(stage - 1)
        if stage > 0 and not leaves:
            self.inbox[Kind.RECV_BACKWARD, stage - 1, number] = flight.input_gradients
            flight.input_gradients = []
        if flight.deferred is None and not leaves:
            del self.flights[stage, number]

    def _weight_gradients(self, stage: int, number: int) -> None:
        flight = self.flights.pop((stage, number))
        assert flight.deferred is not None
        with self.stopwatch.span(Action(Kind.WEIGHT_GRAD, stage, number)):
            flight.deferred.finish()

    # Travelling -----------------------------------------------------------------------------------------------

    def _is_mine(self, stage: int) -> bool:
        return self.stages.owners[stage] == self.rank

    def _leaves(self, stage: int, number: int) -> list[Any]:
        """What travels into a stage."""
        return self.works[number].script.entries[self.stages.bounds[stage]]

    @property
    def _mail(self) -> Mail:
        assert self.mail is not None
        return self.mail

    def _send_forward(self, stage: int, number: int) -> None:
        flight = self.flights[stage, number]
        self._mail.send(flight.outputs, self.stages.owners[stage + 1], channel="forward", purpose="activations")
        flight.outputs = []
        if not self.training:
            del self.flights[stage, number]

    def _receive_forward(self, stage: int, number: int) -> None:
        like = [leaf.like for leaf in self._leaves(stage, number)]
        self.inbox[Kind.RECV_FORWARD, stage, number] = self._mail.post(
            like, self.stages.owners[stage - 1], channel="forward"
        )

    def _send_backward(self, stage: int, number: int) -> None:
        flight = self.flights[stage, number]
        self._mail.send(flight.input_gradients, self.stages.owners[stage - 1], channel="backward", purpose="gradients")
        flight.input_gradients = []
        if flight.deferred is None:
            del self.flights[stage, number]

    def _receive_backward(self, stage: int, number: int) -> None:
        like = [leaf.like for leaf in self._leaves(stage + 1, number) if leaf.needs_grad]
        self.inbox[Kind.RECV_BACKWARD, stage, number] = self._mail.post(
            like, self.stages.owners[stage + 1], channel="backward"
        )

    def _take(self, kind: Kind, stage: int, number: int) -> list[Tensor]:
        arrived = self.inbox.pop((kind, stage, number))
        return arrived if isinstance(arrived, list) else arrived.wait()


def loss_of(returned: Any) -> Tensor | None:
    """The loss that a step returned, as Lightning understands it; None if it returned none.

    Raises:
        ConfigurationError: what it returned has no loss that can be differentiated.
    """
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if loss is None and returned is None:
        return None
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            f"training_step returned a {type(returned).__name__} without a loss: return the loss, or a dict with it "
            'under "loss"'
        )
    if loss.numel() != 1 or loss.grad_fn is None:
        raise ConfigurationError(
            f"training_step returned a loss of shape {tuple(loss.shape)}"
            + (" that depends on no trained parameter" if loss.grad_fn is None else ": it must be one number")
        )
    return loss


def _is_zero(weight: float | Tensor) -> bool:
    """Of a micro-batch that teaches nothing: its loss may be NaN, the mean over no samples, and has no gradient."""
    return isinstance(weight, float) and weight == 0


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
