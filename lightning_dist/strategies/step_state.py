"""What a step leaves behind in the module, repeated on the ranks that have not computed its end.

Under a pipeline only the last stage runs what comes after the layers: the loss, metrics, ``self.log``, and lists that
user code fills for the end of an epoch. Callbacks and hooks run on every rank, so every rank must find the same there::

    last stage    Recorder: self.log(...) per micro-batch     changes since `Snapshot`: metrics, plain attributes
                                        |  one message  |
    every rank    self.log(...) once, with the values of the whole batch; the same metrics and attributes
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from lightning_dist.core.errors import ConfigurationError

Logged = list[tuple[str, Any, dict[str, Any]]]
"""Names, values and arguments of calls of ``self.log``. A metric is named by its place in the module."""

_PLAIN = (int, float, bool, str, bytes, complex, type(None), Tensor)
_OURS_AND_LIGHTNINGS = frozenset(vars(pl.LightningModule()))


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
            value = _Place(self._names[id(value)]) if id(value) in self._names else value
        elif isinstance(value, Tensor):
            value = value.detach()
        values, arguments = self._calls.setdefault(name, ([], []))
        values.append(value)
        arguments.append(kwargs)

    def forget(self) -> None:
        """Drop what was noted, as of a rehearsal."""
        self._calls.clear()

    def logged(self, weights: Sequence[float]) -> Logged:
        """What one call for the whole batch would have logged."""
        return [(name, _combine(name, *noted, weights), _merged(noted[1])) for name, noted in self._calls.items()]


class _Place(str):
    """The name of a metric in the module."""


def _merged(arguments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The arguments of the last call; a batch size is that of all calls together."""
    merged = dict(arguments[-1])
    sizes = [one.get("batch_size") for one in arguments]
    if merged.get("batch_size") is not None and None not in sizes:
        merged["batch_size"] = sum(sizes)
    if isinstance(merged.get("metric_attribute"), str):
        merged.pop("metric_attribute")
    return merged


def _combine(name: str, values: Sequence[Any], arguments: Sequence[dict[str, Any]], weights: Sequence[float]) -> Any:
    if isinstance(values[-1], (_Place, Metric)):
        return values[-1]
    numbers = torch.stack([torch.as_tensor(value).detach().double().reshape(()) for value in values])
    reduce = arguments[-1].get("reduce_fx", "mean")
    table: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
    kind = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "mean")
    if kind in table:
        total = table[kind](numbers)
    elif len(values) == len(weights):
        total = (numbers * torch.tensor(weights, dtype=torch.float64)).sum()
    else:  # not in every micro-batch, or several times in one
        total = numbers.mean()
    like = values[-1]
    floating = isinstance(like, Tensor) and like.is_floating_point()
    return total.to(like.dtype) if floating else total.float()


def replay(module: "pl.LightningModule", logged: Logged) -> None:
    """Call ``self.log`` with what was noted."""
    for name, value, arguments in logged:
        held: Any = module.get_submodule(value) if isinstance(value, _Place) else value
        module.log(name, held, **arguments)


class Snapshot:
    """The metrics and plain attributes of a module before a step."""

    def __init__(self, module: "pl.LightningModule") -> None:
        self.module = module
        self.metrics = {name: _lengths(metric) for name, metric in _metrics(module)}
        self.attributes = {name: (value, _size(value)) for name, value in _attributes(module).items()}

    def changes(self) -> dict[str, Any]:
        """What a step has changed since, to be given to `apply` on another rank."""
        for collection in (part for part in self.module.modules() if isinstance(part, MetricCollection)):
            list(collection.items(keep_base=True, copy_state=False))  # metrics that share states show them
        metrics = {
            name: _metric_changes(metric, self.metrics[name])
            for name, metric in _metrics(self.module)
            if metric._update_count != self.metrics[name][""]
        }
        attributes: dict[str, tuple[int, Any]] = {}
        for name, value in _attributes(self.module).items():
            before, size = self.attributes.get(name, (None, None))
            if value is before and isinstance(value, list) and size is not None and len(value) >= size:
                if len(value) > size:
                    attributes[name] = size, value[size:]
            elif value is not before or _size(value) != size or isinstance(value, (dict, list, set)):
                attributes[name] = -1, value
        return {"metrics": metrics, "attributes": attributes}

    def apply(self, changes: Mapping[str, Any]) -> None:
        """Repeat the changes of another rank. Lists that have grown there grow here."""
        metrics = dict(_metrics(self.module))
        for name, states in changes["metrics"].items():
            _apply_to_metric(metrics[name], states, self.metrics[name])
        for name, (size, value) in changes["attributes"].items():
            if size < 0:
                setattr(self.module, name, value)
            else:
                held = getattr(self.module, name)
                del held[size:]
                held.extend(value)

    def restore(self) -> None:
        """Undo what a rehearsal has done to plain attributes."""
        for name in set(_attributes(self.module)) - set(self.attributes):
            delattr(self.module, name)
        for name, (value, size) in self.attributes.items():
            if isinstance(value, list) and size is not None:
                del value[size:]
            vars(self.module)[name] = value


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
    return pytree.tree_map_only(Tensor, lambda state: state.detach(), states)  # type: ignore[no-any-return]


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


def _attributes(module: "pl.LightningModule") -> dict[str, Any]:
    """What user code keeps in a module besides parameters, buffers and parts: plain data."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OURS_AND_LIGHTNINGS and not name.startswith("_lightning_dist") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, (list, tuple, set, dict)) and type(value).__module__ in ("builtins", "collections"):
        return all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value))
    return False


def _size(value: Any) -> int | None:
    return len(value) if isinstance(value, (list, dict, set)) else None


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
