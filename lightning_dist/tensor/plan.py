"""Which parameter is cut, and how: from the user's plan, the model's own, or the table of module types.

A plan maps name patterns to styles (`styles`). A pattern is a path whose parts may hold ``*`` (one part) and names
modules or parameters::

    {"blocks.*.attn.qkv": "qkv_colwise", "blocks.*.attn.proj": "rowwise", "blocks.*.fc1": "colwise", ...}

Nothing is guessed: a model for which none of the three sources says anything is refused, with a suggestion to check and
paste; whatever a plan does not name stays whole.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lightning_dist.core.errors import ConfigurationError, UnsupportedModelError
from lightning_dist.tensor.compiled import WRAPPER
from lightning_dist.tensor.families import FAMILIES
from lightning_dist.tensor.styles import Style, style

ATTRIBUTE = "tp_plan"


@dataclass(frozen=True)
class Target:
    """A module or a bare parameter of `module`, by its full name, and its style."""

    name: str
    parent: nn.Module
    key: str
    style: Style


def find_targets(module: nn.Module, user_plan: Mapping[str, str] | None) -> list[Target]:
    """Everything that is to be cut, in the order of the module.

    Raises:
        ConfigurationError: two plans for one module, a pattern that names nothing, an unknown style.
        UnsupportedModelError: no source says anything about this module.
    """
    own = inspect.getattr_static(module, ATTRIBUTE, None)  # Hugging Face has a property of this name
    own = own if isinstance(own, Mapping) else None
    if user_plan is not None and own is not None:
        raise ConfigurationError(
            f"two plans for one module: the strategy's tp_plan and {type(module).__name__}.{ATTRIBUTE}; remove one"
        )
    plan = user_plan if user_plan is not None else own
    if plan is not None:
        found = _by_patterns(module, "", plan, strict=True)
    else:
        found = {}
        for name, sub in module.named_modules():
            found.update(_of_hugging_face(module, name, sub))
        for name, sub in module.named_modules():
            found.update(_of_family(module, name, sub))
    if not any(target.style.side.value != "none" or target.style.experts for target in found.values()):
        raise UnsupportedModelError(_nothing_known(module))
    return list(found.values())


def _by_patterns(root: nn.Module, prefix: str, plan: Mapping[str, str], *, strict: bool) -> dict[str, Target]:
    """`prefix` is the path of the module that the patterns are relative to."""
    found: dict[str, Target] = {}
    start = f"{prefix}." if prefix else ""
    names = [name for name, _ in root.named_modules(remove_duplicate=False)]
    names += [name for name, _ in root.named_parameters(remove_duplicate=False)]
    below = [name for name in dict.fromkeys(names) if name.startswith(start) and name != prefix]
    for pattern, style_name in plan.items():
        kind = style(style_name, pattern)
        hits = [name for name in below if _matches(name[len(start) :], pattern)]
        if not hits and strict:
            raise ConfigurationError(
                f'tp_plan["{pattern}"] names nothing in the module. Names are such as '
                f"{', '.join(n for n in below if '.' in n)[:200] or below}; a * stands for one part"
            )
        for name in hits:
            found[name] = _target(root, name, kind)
    return found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.replace(WRAPPER, "").split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _target(root: nn.Module, name: str, kind: Style) -> Target:
    path, _, key = name.rpartition(".")
    return Target(name, root.get_submodule(path), key, kind)


def _of_hugging_face(root: nn.Module, name: str, sub: nn.Module) -> dict[str, Target]:
    """The plan that a Hugging Face model carries, and its embeddings, of which the plan says nothing."""
    config = getattr(sub, "config", None)
    if config is None or not hasattr(sub, "get_input_embeddings") or not hasattr(sub, "_tp_plan"):
        return {}
    plan = dict(getattr(sub, "_tp_plan", None) or {})
    base = getattr(sub, "base_model_prefix", "")
    inner = getattr(sub, base, None) if base else None
    at = f"{base}." if isinstance(inner, nn.Module) and inner is not sub else ""
    plan = {f"{at}{k}": v for k, v in (getattr(config, "base_model_tp_plan", None) or {}).items()} | plan
    found = _by_patterns(root, name, plan, strict=False)
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            layer = getattr(sub, getter)()
        except NotImplementedError:  # how models without words (vision, audio) answer
            continue
        path = next((n for n, m in sub.named_modules() if m is layer), None) if layer is not None else None
        inner = getattr(layer, "original_module", layer)  # peft keeps a copy beside it that is trained whole
        if path is not None and isinstance(inner, (nn.Embedding, nn.Linear)):
            full = f"{name}.{path}" if name else path
            found[full] = _target(root, full, style("colwise", path))
    return found


def _of_family(root: nn.Module, name: str, sub: nn.Module) -> dict[str, Target]:
    found = {}
    for path, style_name in FAMILIES.get(type(sub).__name__, {}).items():
        holder, _, key = path.rpartition(".")
        try:
            parent = sub.get_submodule(holder)
        except AttributeError:
            continue
        if getattr(parent, key, None) is not None:
            full = ".".join(part for part in (name, path) if part)
            found[full] = _target(root, full, style(style_name, path))
    return found


# Suggestions ----------------------------------------------------------------------------------------------------


def linears(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every linear by name."""
    for name, sub in module.named_modules():
        if isinstance(sub, nn.Linear) or type(sub).__name__ == "Conv1D":
            yield name, sub


def suggest(module: nn.Module) -> dict[str, str]:
    """A plan to check by hand: in every module with several linears the last is rowwise, those before it colwise."""
    by_parent: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, sub in linears(module):
        by_parent.setdefault(name.rpartition(".")[0], []).append((name, sub))
    plan: dict[str, str] = {}
    for group in by_parent.values():
        if len(group) < 2:
            continue
        for index, (name, _) in enumerate(group):
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            fused = group[index][0].rpartition(".")[2] in ("qkv", "qkv_proj", "c_attn", "in_proj", "Wqkv")
            plan[pattern] = "rowwise" if index == len(group) - 1 else "qkv_colwise" if fused else "colwise"
    return plan


def _nothing_known(module: nn.Module) -> str:
    names = [f"{n} {tuple(getattr(m, 'weight').shape)}" for n, m in linears(module)]  # noqa: B009
    shown = "\n".join(f"  {line}" for line in names[:40]) + ("\n  ..." if len(names) > 40 else "")
    plan = "\n".join(f'    "{k}": "{v}",' for k, v in suggest(module).items())
    return (
        f"{type(module).__name__} cannot be cut for tensor parallelism: neither a tp_plan, nor a plan of the model, "
        f"nor a known module type says how. Its linears (out, in):\n{shown}\n"
        "Pass TensorParallelStrategy(tp_plan=...) or set the attribute tp_plan on the module. A pair of linears is cut "
        '"colwise", then "rowwise"; a suggestion, to be checked against what the code does between them:\n'
        f"  tp_plan={{\n{plan}\n  }}"
    )
