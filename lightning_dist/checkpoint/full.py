"""The "full" format: what DDP would have written, collected tensor by tensor onto rank 0.

Only rank 0 ever holds the whole, on the CPU, and no other rank holds more than its shards: each parameter (and each of
its optimizer states) is sent to rank 0 piece by piece. The other ranks get the same keys with tensors on the meta
device, so that hooks which edit a checkpoint run alike everywhere and cost nothing.

Optimizer state is keyed as torch keys it: by the number of the parameter in the order of the groups.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.comm.parts import join
from lightning_dist.comm.rollcall import Place
from lightning_dist.core.errors import ConfigurationError
from lightning_dist.core.shard import Home, home_of
from lightning_dist.zero import ZeroEngine
from lightning_dist.zero.adoption import shard_state
from lightning_dist.zero.slot import Slot


def full_state_dict(engine: ZeroEngine, module: nn.Module | None = None) -> dict[str, Any]:
    """``module.state_dict()`` with whole values in the parameters' own dtype, on rank 0; collective.

    Custom `state_dict` methods and hooks run as usual. Tied parameters appear under each name, as one tensor.

    Args:
        module: the engine's module (default) or a part of it.
    """
    module = engine.module if module is None else module
    engine.mesh.rollcall.call(Place.SAVE, what="of the module's weights")
    engine.notice_writes()
    raw = module.state_dict(keep_vars=True)
    whole: dict[nn.Parameter, Tensor] = {}
    homes = {id(buffer): home_of(part) for part in module.modules() for buffer in part.buffers(recurse=False)}
    state: dict[str, Any] = type(raw)()
    if hasattr(raw, "_metadata"):  # versions of the modules, which `load_state_dict` of some of them asks for
        state._metadata = raw._metadata  # type: ignore[attr-defined]
    for key, value in raw.items():
        slot = engine.slots.get(value) if isinstance(value, nn.Parameter) else None
        if slot is None:
            state[key] = _buffer(engine, value, homes.get(id(value))) if isinstance(value, Tensor) else value
        else:
            if slot.parameter not in whole:
                whole[slot.parameter] = _collect(engine, slot, slot.group.piece(slot.group.owned, slot))
            state[key] = whole[slot.parameter]
    return state


def full_optimizer_state(engine: ZeroEngine, optimizer: Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` as an optimizer of whole parameters would give it, on rank 0; collective."""
    engine.mesh.rollcall.call(Place.SAVE, what="of the optimizer")
    by_fragment = {slot.fragment: slot for slot in engine.slots.values()}
    packed = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters):
        kept = packed["state"].get(number)
        if kept is None:
            continue
        slot = by_fragment[parameter]
        state[number] = {
            key: _collect(engine, slot, value.reshape(-1)) if _per_element(value, parameter) else _plain(value)
            for key, value in kept.items()
        }
    return {"state": state, "param_groups": packed["param_groups"]}


def local_optimizer_state(engine: ZeroEngine, optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of a full optimizer state, ready for ``optimizer.load_state_dict``; local.

    Raises:
        ConfigurationError: the state is of an optimizer with other parameter groups or shapes.
    """
    by_fragment = {slot.fragment: slot for slot in engine.slots.values()}
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    if ours != theirs:
        raise ConfigurationError(
            f"the checkpoint's {len(theirs)} parameter groups hold {theirs} parameters, this optimizer's {ours}: "
            "configure_optimizers must build the groups that the checkpoint was written with"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"]:
            slot = by_fragment[parameter]
            state[number] = {key: _cut(value, slot, key) for key, value in saved["state"][number].items()}
    return {"state": state, "param_groups": saved["param_groups"]}


def _cut(value: Any, slot: Slot, key: str) -> Any:
    shape = slot.group.spec(slot).global_shape
    if isinstance(value, Tensor) and value.ndim and tuple(value.shape) != shape and value.numel() != 1:
        raise ConfigurationError(
            f"optimizer state {key!r} of {slot.name} has shape {tuple(value.shape)} in the checkpoint, the parameter "
            f"has {shape}: it was written for another model"
        )
    return shard_state(value, slot)


def _per_element(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape


def _plain(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _collect(engine: ZeroEngine, slot: Slot, piece: Tensor) -> Tensor:
    """The whole tensor on rank 0's CPU, a meta tensor elsewhere; collective where it is sharded or cut."""
    shape = slot.shape if slot.cut is None else torch.Size(slot.cut.shape)
    whole = _collect_whole(engine, slot, piece.detach()) if slot.group.here else None
    whole = _to_first_stage(engine, whole, shape, piece, slot.group.home)
    return _on_meta(shape, piece) if whole is None or engine.mesh.rank else _cpu(whole)


def _collect_whole(engine: ZeroEngine, slot: Slot, piece: Tensor) -> Tensor | None:
    """The whole tensor on the first data- and tensor-parallel rank of its stage, None on the others."""
    part = _collect_part(engine, slot, piece)
    cut, tp = slot.cut, engine.mesh.tp
    if cut is None or part is None:
        return part if tp.rank == 0 else None
    sizes = [prod(cut.local_shape(rank)) for rank in range(tp.size)]
    out = torch.empty(sum(sizes), dtype=piece.dtype, device=piece.device) if tp.rank == 0 else None
    tp.collect(part.reshape(-1), sizes, purpose="checkpoint", out=out)
    if out is None:
        return None
    parts = [flat.view(cut.local_shape(rank)) for rank, flat in enumerate(torch.split(out, sizes))]
    return join(parts, cut.dim, cut.split)


def _to_first_stage(
    engine: ZeroEngine, whole: Tensor | None, shape: torch.Size, like: Tensor, home: Home | None
) -> Tensor | None:
    """Bring a whole tensor from the stage that speaks for it to the first one; collective along the stages."""
    mesh = engine.mesh
    if home is None or home.first == 0 or mesh.dp.rank or mesh.tp.rank:
        return whole
    sizes = [prod(shape) if rank == home.first else 0 for rank in range(mesh.pp.size)]
    piece = whole.reshape(-1) if whole is not None and mesh.pp.rank == home.first else like.new_empty(0)
    out = torch.empty(prod(shape), dtype=like.dtype, device=like.device) if mesh.pp.rank == 0 else None
    mesh.pp.collect(piece, sizes, purpose="checkpoint", out=out)
    return None if out is None else out.view(shape)


def _buffer(engine: ZeroEngine, buffer: Tensor, home: Home | None) -> Tensor:
    """As the stage has it that computes its module; on the other stages as it is there."""
    arrived = _to_first_stage(engine, buffer.detach(), buffer.shape, buffer.detach(), home)
    return (buffer.detach() if arrived is None else arrived).cpu().clone()


def _collect_part(engine: ZeroEngine, slot: Slot, piece: Tensor) -> Tensor | None:
    """The tensor-parallel part on the first data-parallel rank, None on the others."""
    axis, group = engine.mesh.dp, slot.group
    if not group.sharded_state:
        return piece.reshape(slot.shape) if axis.rank == 0 else None
    sizes = [group.spec(slot, rank).numel for rank in range(axis.size)]
    out = torch.empty(sum(sizes), dtype=piece.dtype, device=piece.device) if axis.rank == 0 else None
    axis.collect(piece, sizes, purpose="checkpoint", out=out)
    return None if out is None else out.view(slot.shape)


def _on_meta(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device="meta")


def _cpu(part: Tensor) -> Tensor:
    return part.cpu().clone() if part.device.type == "cpu" else part.cpu()
