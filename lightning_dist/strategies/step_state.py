"""What a step leaves behind in the module, repeated on the ranks that have not computed its end.

Under a pipeline only the last stage runs what comes after the layers: the loss, metrics, ``self.log``, and lists that
user code fills for the end of an epoch. Callbacks and hooks run on every rank, so every rank must find the same there::

    last stage    Recorder: self.log(...) per micro-batch     changes since `Snapshot`: metrics, plain attributes
                                        |  one message  |
    every rank    self.log(...) once, with the values of the whole batch; the same metrics and attributes
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from lightning_dist.core.errors import ConfigurationError, UnsupportedModelError
from lightning_dist.core.shard import home_of
from lightning_dist.pipeline.attributes import Seen, attributes, number_of_hooks, restore
from lightning_dist.pipeline.fakes import is_fake, origin_of
from lightning_dist.pipeline.micro_batches import merge, tensors_in, weighted_sum

Logged = list[tuple[str, Any, dict[str, Any]]]
"""Names, values and arguments of calls of ``self.log``. A metric is a `_Logged`."""

_TORCHS = frozenset(vars(nn.Module()))
_LIGHTNINGS = frozenset(vars(pl.LightningModule()))


class Recorder:
    """Takes the place of ``self.log`` while micro-batches run."""

    def __init__(self, module: "pl.LightningModule") -> None:
        self.module = module
        self._names = {id(part): name for name, part in module.named_modules()}
        self._calls: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block ``self.log`` notes down; `log_dict` calls it."""
        vars(self.module)["log"] = self._log
        try:
            yield
        finally:
            del vars(self.module)["log"]

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if args:  # prog_bar and what follows, by position
            names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
            kwargs |= dict(zip(names, args, strict=False))
        if isinstance(value, Metric):
            value = _Logged(self._names.get(id(value)), value, value._forward_cache)
        elif isinstance(value, Tensor):
            value = value.detach()
        values, arguments = self._calls.setdefault(name, ([], []))
        values.append(value)
        arguments.append(kwargs)

    def noted(self) -> dict[str, int]:
        """How often each name was logged so far."""
        return {name: len(values) for name, (values, _) in self._calls.items()}

    def forget(self, since: Mapping[str, int]) -> None:
        """Drop what was noted after `noted` has said this."""
        for name, (values, arguments) in list(self._calls.items()):
            del values[since.get(name, 0) :], arguments[since.get(name, 0) :]
            if not values:
                del self._calls[name]

    def logged(self, weights: Sequence[float]) -> Logged:
        """What one call for the whole batch would have logged.

        Raises:
            UnsupportedModelError: a value does not exist on the stage that has run the step to its end.
        """
        for name, (values, _) in self._calls.items():
            _insist_on_values(values, f'self.log("{name}", ...) was given')
        return [(name, _combine(*noted, weights), _merged(noted[1])) for name, noted in self._calls.items()]


@dataclass(frozen=True)
class _Logged:
    """A metric that was logged: its name in the module, if it has one there, and what it was for the micro-batch."""

    name: str | None
    metric: Metric | None
    value: Any


def _merged(arguments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The arguments of the last call; a batch size is that of all calls together."""
    merged = dict(arguments[-1])
    sizes = [one.get("batch_size") for one in arguments]
    if merged.get("batch_size") is not None and None not in sizes:
        merged["batch_size"] = sum(sizes)
    if isinstance(merged.get("metric_attribute"), str):
        merged.pop("metric_attribute")
    return merged


def _combine(values: Sequence[Any], arguments: Sequence[dict[str, Any]], weights: Sequence[float]) -> Any:
    if isinstance(values[-1], _Logged):
        last, whole = values[-1], values[-1].value
        if len(values) == len(weights):  # of the batch: exact where a metric is a mean over samples
            whole = merge([one.value for one in values], [0] * len(values), weights)
        return _Logged(last.name, None if last.name is not None else last.metric, whole)
    numbers = torch.stack([torch.as_tensor(value).detach().double().reshape(()) for value in values])
    reduce = arguments[-1].get("reduce_fx", "mean")
    table: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
    kind = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "mean")
    if kind in table:
        total = table[kind](numbers)
    elif len(values) == len(weights):
        total = weighted_sum(list(numbers), weights)
    else:  # not in every micro-batch, or several times in one
        total = numbers.mean()
    like = values[-1]
    floating = isinstance(like, Tensor) and like.is_floating_point()
    return total.to(like.dtype) if floating else total.float()


def replay(module: "pl.LightningModule", logged: Logged) -> None:
    """Call ``self.log`` with what was noted."""
    for name, value, arguments in logged:
        held: Any = value
        if isinstance(value, _Logged):
            held = value.metric if value.name is None else module.get_submodule(value.name)
            held._forward_cache = value.value
        module.log(name, held, **arguments)


class Snapshot:
    """The metrics, plain attributes and shared buffers of a module before a step.

    Args:
        parts: the modules, by their names, that run on every stage: `module` itself and those around the layers.
            What others keep is where they are computed.
        thorough: copies of all values, so that `restore` undoes writes in place too.
    """

    def __init__(self, module: "pl.LightningModule", parts: Mapping[str, nn.Module], *, thorough: bool = False) -> None:
        self.module = module
        self.parts = {name: part for name, part in parts.items() if not isinstance(part, (Metric, MetricCollection))}
        self.metrics = {name: _lengths(metric) for name, metric in _metrics(module)}
        self.attributes = {name: _seen(part) for name, part in self.parts.items()}
        self.buffers = {name: Seen(buffer) for name, buffer in self._buffers()}
        self.copies: dict[str, dict[str, Any]] | None = None
        if thorough:
            self.copies = {name: _copied(vars(metric), metric._defaults) for name, metric in _metrics(module)}
            self.hooks = number_of_hooks(module.modules())
            for seen in (*(s for kept in self.attributes.values() for s in kept.values()), *self.buffers.values()):
                seen.keep()

    def changes(self) -> dict[str, Any]:
        """What a step has changed since, to be given to `apply` on another rank.

        Raises:
            UnsupportedModelError: it has left something in an attribute that does not exist on this stage.
        """
        for collection in (part for part in self.module.modules() if isinstance(part, MetricCollection)):
            list(collection.items(keep_base=True, copy_state=False))  # metrics that share states show them
        metrics = {
            name: _metric_changes(metric, self.metrics[name])
            for name, metric in _metrics(self.module)
            if metric._update_count != self.metrics[name][""]
        }
        attributes: dict[tuple[str, str], tuple[int, Any]] = {}
        for part, kept in self.attributes.items():
            for name, value in _attributes(self.parts[part]).items():
                before = kept.get(name)
                if before is not None and before.size is not None and before.has_grown(value):
                    if len(value) > before.size:
                        attributes[part, name] = before.size, value[before.size :]
                elif before is None or before.may_differ(value):
                    attributes[part, name] = -1, value
        for (part, name), (_, value) in attributes.items():
            _insist_on_values(value, f"self.{part}{'.' if part else ''}{name} holds")
        buffers = {
            name: buffer
            for name, buffer in self._buffers()
            if name not in self.buffers or self.buffers[name].may_differ(buffer)
        }
        changes = {"metrics": metrics, "attributes": attributes, "buffers": buffers}
        return pytree.tree_map_only(Tensor, Tensor.detach, changes)  # type: ignore[no-any-return]

    def apply(self, changes: Mapping[str, Any]) -> None:
        """Repeat the changes of another rank. Lists that have grown there grow here."""
        metrics, buffers = dict(_metrics(self.module)), dict(self._buffers())
        for name, states in changes["metrics"].items():
            _apply_to_metric(metrics[name], states, self.metrics[name])
        for (part, name), (size, value) in changes["attributes"].items():
            if size < 0:
                setattr(self.parts[part], name, value)
            else:
                held = getattr(self.parts[part], name)
                del held[size:]
                held.extend(value)
        for name, value in changes["buffers"].items():
            with torch.no_grad():
                buffers[name].copy_(value)

    def restore(self) -> None:
        """Undo what was done since. It must be `thorough`."""
        assert self.copies is not None
        flags = number_of_hooks(self.module.modules()) == self.hooks  # else one may be the note that hooks are there
        for part, kept in self.attributes.items():
            restore(self.parts[part], kept, _names_of_others(self.parts[part]), flags=flags)
        for name, metric in _metrics(self.module):
            vars(metric).update(_copied(self.copies[name], metric._defaults))
        for seen in self.buffers.values():
            seen.restored()

    def _buffers(self) -> list[tuple[str, Tensor]]:
        """Those of what several ranks run; others are where they are computed."""
        return [
            (f"{name}.{key}" if name else key, buffer)
            for name, part in self.module.named_modules()
            if name in self.parts or (home := home_of(part)) is None or len(home.ranks) > 1
            for key, buffer in part.named_buffers(recurse=False)
        ]


def _insist_on_values(value: Any, said: str) -> None:
    for _, tensor in tensors_in(value, ""):
        if is_fake(tensor):
            raise UnsupportedModelError(
                f"{said} {origin_of(tensor)}, which has no values where the step ends: it is computed on another "
                "pipeline stage, and from stage to stage travel only the arguments of the layers. Leave it out, or "
                "pass it through the layers"
            )


def _copied(states: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """States of a metric, with lists and tensors of their own."""
    kept = {name: states[name] for name in (*names, "_update_count", "_computed", "_forward_cache")}
    return {n: v.clone() if isinstance(v, Tensor) else copy.copy(v) for n, v in kept.items()}


def _metrics(module: nn.Module) -> list[tuple[str, Metric]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


def _lengths(metric: Metric) -> dict[str, int]:
    """How many entries each list of a metric has; under "" how often it was updated."""
    lists = {name: len(getattr(metric, name)) for name in metric._defaults if isinstance(getattr(metric, name), list)}
    return {"": metric._update_count} | lists


def _metric_changes(metric: Metric, before: Mapping[str, int]) -> dict[str, Any]:
    states: dict[str, Any] = {"": metric._update_count}
    for name in metric._defaults:
        value = getattr(metric, name)
        states[name] = value[before[name] :] if isinstance(value, list) else value
    return states


def _apply_to_metric(metric: Metric, states: Mapping[str, Any], before: Mapping[str, int]) -> None:
    for name, value in states.items():
        if not name:
            metric._update_count = value
        elif isinstance(value, list):
            held = getattr(metric, name)
            setattr(metric, name, [*held[: before[name]], *value])
        else:
            setattr(metric, name, value.to(metric.device))
    metric._computed = None


def _attributes(part: nn.Module) -> dict[str, Any]:
    return attributes(part, _names_of_others(part))


def _seen(part: nn.Module) -> dict[str, Seen]:
    return {name: Seen(value) for name, value in _attributes(part).items()}


def _names_of_others(part: nn.Module) -> frozenset[str]:
    """Attributes that are not the user's."""
    return _LIGHTNINGS if isinstance(part, pl.LightningModule) else _TORCHS


def refuse_manual_optimization(module: "pl.LightningModule") -> None:
    """A pipeline runs forward and backward of all micro-batches itself.

    Raises:
        ConfigurationError: the module asks for its own backward.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__} uses manual optimization (automatic_optimization = False), which a pipeline "
            "cannot do: its backward runs between the forwards of other micro-batches, not where "
            "self.manual_backward(loss) stands. Use automatic optimization, or a strategy without a pipeline "
            '("zero3", "tp")'
        )
