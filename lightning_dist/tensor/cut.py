"""`cut_module`: cut a module in place, over the tensor-parallel axis, by the targets of its plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lightning_dist.comm import pairs
from lightning_dist.comm.agreement import DIFFERENT_MODELS, insist_on_equal
from lightning_dist.comm.mesh import Axis
from lightning_dist.core.errors import ConfigurationError, UnsupportedModelError
from lightning_dist.core.shard import CUT, cut_of
from lightning_dist.core.split import Split, even_split
from lightning_dist.params.hooks import ModuleHook
from lightning_dist.params.questions import CLASS, in_words
from lightning_dist.tensor.compiled import refuse_compiled
from lightning_dist.tensor.layers import SEQUENCE, SIBLINGS, Siblings
from lightning_dist.tensor.parameter import LIE, CutParameter, cut_in_place
from lightning_dist.tensor.plan import Target, find_targets, linears
from lightning_dist.tensor.split_tensor import WRITABLE, SplitTensor, whole
from lightning_dist.tensor.styles import Side


@dataclass(frozen=True)
class Report:
    """What was cut: full names of cut parameters, of linears that stay whole, hooks, groups that read one input."""

    cut: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    hooks: list[RemovableHandle] = field(default_factory=list)
    siblings: list[Siblings] = field(default_factory=list)

    def forget_inputs(self) -> None:
        """A forward was left in the midst of it: what its modules would have forgotten at their ends is forgotten."""
        for group in self.siblings:
            group.forget()

    def __deepcopy__(self, memo: object) -> "Report":
        """A copy of the module has no hooks of ours, and is whole if it is taken inside `gathered`."""
        return Report()


def cut_module(
    module: nn.Module,
    axis: Axis,
    *,
    plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
) -> Report:
    """Cut `module` in place; every rank keeps its parts. Collective: rank 0's values are taken on all ranks.

    Args:
        module: whole on every rank, with the same names and shapes.
        axis: the tensor-parallel axis.
        plan: name patterns to styles; by default the module's own, see `plan`.
        sequence_parallel: divide what lies between the cut layers (norms, dropout, residuals) along the sequence.

    Raises:
        ConfigurationError: see `find_targets`; a size that cannot be divided (heads); conflicting styles of one weight.
        UnsupportedModelError: no plan is known for the module; a style that does not fit a module; a compiled module.
        RankMismatchError: the ranks have other modules or other plans.
    """
    targets = find_targets(module, plan)
    refuse_compiled(module, [target.name for target in targets])
    wanted: dict[nn.Parameter, _Wanted] = {}
    groups: dict[nn.Module, Siblings] = {}
    for target in targets:
        for item in _wanted_of(target, axis):
            known = wanted.setdefault(item.parameter, item)
            if (known.dim, known.split) != (item.dim, item.split):
                raise ConfigurationError(
                    f"{known.name} and {item.name} are the same parameter but would be cut differently (dim "
                    f'{known.dim} and dim {item.dim}); give both the same style, or "replicate"'
                )
    for target in targets:
        if target.style.experts:
            _refuse_what_does_not_add_up(target, wanted)
    names = {p: n for n, p in module.named_parameters()}
    if axis.rollcall is not None:
        insist_on_equal([in_words(n, p) for p, n in names.items()], axis.rollcall, DIFFERENT_MODELS)
        cuts = [f"{names[p]} cut along dim {item.dim} as {item.split.parts}" for p, item in wanted.items()]
        insist_on_equal(cuts, axis.rollcall, "The ranks would cut the module differently: give all the same plan.")
    for tensor in (*names, *module.buffers()):
        if not tensor.is_meta:  # of another stage
            axis.broadcast(tensor.data, purpose="setup")
    for parameter, item in wanted.items():
        cut = cut_in_place(parameter, axis, item.dim, item.split, name=names[parameter])
        _refuse_old_graph(cut, names[parameter])
        if sequence_parallel:
            cut.__dict__[SEQUENCE] = True
        if item.reads_shared_input:
            siblings = groups.setdefault(item.parent, Siblings(axis))
            siblings.weights.append(cut)
            cut.__dict__[SIBLINGS] = siblings
    hooks = [
        p.register_forward_hook(ModuleHook(_Forgetting(siblings)), always_call=True) for p, siblings in groups.items()
    ]
    for target in targets:
        if target.style.experts:
            hooks += _hook_experts(target, axis)
    held = {p for p in module.parameters() if cut_of(p) is not None}
    left = [n for n, m in linears(module) if held.isdisjoint(m.parameters())]
    return Report([names[p] for p in wanted], left, hooks, list(groups.values()))


def _refuse_old_graph(cut: CutParameter, name: str) -> None:
    """What accumulates a parameter's gradient lives as long as any graph that has used it, and keeps its shape."""
    if not cut.requires_grad:
        return
    with torch._C.DisableTorchFunctionSubclass():
        node: Any = get_gradient_edge(cut).node
        own = tuple(cut.shape)
    if tuple(node._input_metadata[0].shape) != own:
        raise UnsupportedModelError(
            f"{name} cannot be cut: something still holds a graph that was computed from the whole of it, a loss that "
            "was kept or the weight of torch.nn.utils.weight_norm (take torch.nn.utils.parametrizations.weight_norm)"
        )


def uncut_module(module: nn.Module, report: Report) -> None:
    """Forget that `module` was cut, once its parameters show whole values again."""
    for hook in report.hooks:
        hook.remove()
    for parameter in module.parameters():
        for attribute in (CUT, CLASS, LIE, SIBLINGS, SEQUENCE, WRITABLE):
            parameter.__dict__.pop(attribute, None)


@dataclass(frozen=True)
class _Wanted:
    name: str
    parameter: nn.Parameter
    dim: int
    split: Split
    parent: nn.Module
    reads_shared_input: bool = False


def _wanted_of(target: Target, axis: Axis) -> list[_Wanted]:
    """The parameters that a target cuts."""
    thing: Any = getattr(target.parent, target.key)
    kind = target.style
    if kind.side is Side.NONE:
        if kind.experts and not isinstance(thing, nn.Module):
            raise UnsupportedModelError(f"{target.name} is not a module of experts")
        return []
    if isinstance(thing, nn.Parameter):
        return _of_parameter(target, thing, axis)
    return [item for name, layer in _layers_of(target.name, thing) for item in _of_adapted(target, layer, axis, name)]


def _layers_of(name: str, thing: nn.Module) -> list[tuple[str, Any]]:
    """A layer itself, or those that peft keeps in its place: the original, and copies that are trained whole.

    Where peft trains single words of a table, it joins them with the others in every forward; that table stays whole.
    """
    if "token_adapter" in thing._modules:
        return []
    original, copies = thing._modules.get("original_module"), thing._modules.get("modules_to_save")
    if original is None or not isinstance(copies, nn.ModuleDict):
        return [(name, thing)]
    trained = [(f"{name}.modules_to_save.{key}", copy) for key, copy in copies.items()]
    return [(f"{name}.original_module", original), *trained]


def _of_adapted(target: Target, layer: Any, axis: Axis, name: str) -> list[_Wanted]:
    base = getattr(layer, "base_layer", None)  # an adapter (LoRA) around the layer
    if base is None:
        return _of_layer(target, layer, axis, name)
    found = _of_layer(target, base, axis, f"{name}.base_layer")
    return found + _of_adapter(target, layer, axis, found[0].split if found else None)


def _of_parameter(target: Target, parameter: nn.Parameter, axis: Axis) -> list[_Wanted]:
    """A bare parameter in the order of `F.linear`: (..., out, in), or a bias (out)."""
    side = target.style.side
    if parameter.ndim == 1:
        if side is Side.IN:
            raise UnsupportedModelError(f"{target.name} has one dim: a rowwise style needs a matrix")
        dim = 0
    else:
        dim = parameter.ndim - (2 if side is Side.OUT else 1)
    split = _split(target, parameter.shape[dim], axis)
    return [] if split is None else [_Wanted(target.name, parameter, dim, split, target.parent)]


def _of_layer(target: Target, layer: Any, axis: Axis, name: str) -> list[_Wanted]:
    weight = layer._parameters.get("weight")  # an attribute may be computed, as by spectral norm, which counts calls
    turned = type(layer).__name__ == "Conv1D"
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2 or isinstance(layer, nn.Bilinear):
        raise UnsupportedModelError(
            f"{name} is a {type(layer).__name__}; tensor-parallel styles cut linears and embeddings (a matrix called "
            "weight) or bare parameters"
        )
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        raise UnsupportedModelError(f"{name}: an embedding with max_norm rescales words in place and cannot be cut")
    column = target.style.side is Side.OUT
    dim = int(column == turned)
    split = _split(target, weight.shape[dim], axis)
    if split is None:
        return []
    linear = not isinstance(layer, nn.Embedding)
    found = [_Wanted(f"{name}.weight", weight, dim, split, target.parent, column and linear and not turned)]
    bias = getattr(layer, "bias", None)
    if column and isinstance(bias, nn.Parameter):
        found.append(_Wanted(f"{name}.bias", bias, 0, split, target.parent))
    return found


def _of_adapter(target: Target, adapter: Any, axis: Axis, split: Split | None) -> list[_Wanted]:
    """LoRA's two factors: the one that faces the cut side is cut like the layer, the other stays whole on all ranks."""
    if split is None:
        return []
    column = target.style.side is Side.OUT
    holder, dim = ("lora_B", 0) if column else ("lora_A", 1)
    found = []
    for name, factor in getattr(adapter, holder, {}).items():
        weight = getattr(factor, "weight", None)
        if isinstance(factor, nn.Linear) and isinstance(weight, nn.Parameter) and weight.shape[dim] == split.size:
            found.append(_Wanted(f"{target.name}.{holder}.{name}.weight", weight, dim, split, factor))
    return found


def _refuse_what_does_not_add_up(target: Target, wanted: Mapping[nn.Parameter, _Wanted]) -> None:
    """Each rank runs the experts on its parts as plain tensors, and what they return is added up.

    That is right for stacks of matrices that are cut in pairs, and for nothing beside them, such as a bias.
    """
    experts: nn.Module = getattr(target.parent, target.key)
    own = dict(experts.named_parameters())
    cut = [wanted[parameter] for parameter in own.values() if parameter in wanted]
    sides = {item.parameter.ndim - item.dim for item in cut}
    if cut and (len(cut) < len(own) or sides != {1, 2} or any(item.parameter.ndim != 3 for item in cut)):
        said = ", ".join(
            f"{name} {tuple(p.shape)} " + (f"cut along dim {wanted[p].dim}" if p in wanted else "whole")
            for name, p in own.items()
        )
        raise ConfigurationError(
            f'{target.name} cannot be "moe_tp_experts", by which ranks add up what it returns: each of its parameters '
            "must be a stack of matrices (experts, out, in), one cut along its outputs and the next along its inputs. "
            f"It has {said}. Give styles to what is inside it only"
        )


# Sizes ----------------------------------------------------------------------------------------------------------

_HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_attention_head", "nhead")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_head")


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _split(target: Target, size: int, axis: Axis) -> Split | None:
    """How `size` indices are divided; None to leave the weight whole (fewer key-value heads than ranks).

    Raises:
        ConfigurationError: attention heads that do not divide.
    """
    unit, kind = _head_unit(target, size), target.style
    if unit is None:
        if size % kind.blocks:
            raise ConfigurationError(f"{target.name}: {size} features are not {kind.blocks} equal blocks")
        return even_split(size, axis.size, blocks=kind.blocks)
    head_dim, heads, kv_heads = unit
    blocks: tuple[int, ...] = (size,)
    if kind.blocks == 3:
        blocks = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    for block in blocks:
        own = block // head_dim
        if own % axis.size:
            if own < heads and axis.size % own == 0 and heads % axis.size == 0 and kind.blocks == 1:
                return None
            what = "num_attention_heads" if own == heads else "num_key_value_heads"
            works = [str(n) for n in range(1, own + 1) if own % n == 0 and heads % n == 0]
            raise ConfigurationError(
                f"tp={axis.size} does not divide {what}={own} ({target.name}); use tp={', '.join(works)}"
            )
    return even_split(size, axis.size, blocks=blocks, unit=head_dim)


def _head_unit(target: Target, size: int) -> tuple[int, int, int] | None:
    """(indices per head, heads, key-value heads) where the target projects to attention heads, else None."""
    parent = target.parent
    name = type(parent).__name__.lower()
    if "attention" not in name and "attn" not in name:
        return None
    head_dim, heads = _number(parent, _HEAD_DIM), _number(parent, _HEADS)
    if head_dim is None and heads is not None and isinstance(getattr(parent, "embed_dim", None), int):
        head_dim = int(getattr(parent, "embed_dim")) // heads  # noqa: B009
    if heads is None or head_dim is None:
        return None
    kv_heads = _number(parent, _KV_HEADS) or heads
    if target.style.blocks == 3:
        return (head_dim, heads, kv_heads) if size == (heads + 2 * kv_heads) * head_dim else None
    if size == 3 * heads * head_dim:  # query, key and value of one head side by side
        return 3 * head_dim, heads, heads
    return (head_dim, heads, kv_heads) if size in (heads * head_dim, kv_heads * head_dim) else None


# Hooks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Forgetting:
    siblings: Siblings

    def __call__(self, *_: object) -> None:
        """The shared input ends with the forward of the module whose linears read it."""
        self.siblings.forget()


def _hook_experts(target: Target, axis: Axis) -> list[RemovableHandle]:
    """Every rank runs all experts on its part of their inner features; the module's output is a summand."""
    module = getattr(target.parent, target.key)
    in_parts: list[bool] = []  # for each forward that is under way; inside `gathered` the experts are whole

    def before(mod: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        cut = [parameter for parameter in mod.parameters() if isinstance(parameter, CutParameter)]
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            cut = []  # only shapes are asked for, and a pipeline's rehearsal has whole parameters
        in_parts.append(bool(cut))
        if not cut:
            return None
        for parameter in cut:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        changed: tuple[Any, Any] = pytree.tree_map(enter, (args, kwargs))
        return changed

    def enter(leaf: Any) -> Any:
        if isinstance(leaf, SplitTensor):
            leaf = whole(leaf)
        return pairs.spread(leaf, axis) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf

    def after(mod: nn.Module, args: Any, output: Any) -> Any:
        if not in_parts.pop():
            return None
        for parameter in mod.parameters():
            if cut_of(parameter) is not None:
                parameter.__class__ = CutParameter
        return None if output is None else pytree.tree_map(leave, output)

    def leave(leaf: Any) -> Any:
        return pairs.total(leaf, axis) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return [
        module.register_forward_pre_hook(ModuleHook(before), with_kwargs=True),
        module.register_forward_hook(ModuleHook(after), always_call=True),
    ]
