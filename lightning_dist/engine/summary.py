"""One line at setup: what a rank keeps, and what it will send."""

from lightning_dist.core.stages import Placement, ring_bytes
from lightning_dist.zero.engine import ZeroEngine
from lightning_dist.zero.units import ROOT


def memory_line(engine: ZeroEngine) -> str:
    """Bytes of parameters, gradients and optimizer state per rank, the units, and bytes sent per optimizer step."""
    row, axis = engine.row, engine.mesh.dp
    if not engine.units:
        return f"zero{engine.stage} over {axis.size} ranks: the module has no parameters"
    trainable = [group for group in engine.groups if group.trains]
    parameters = sum(sum(v for k, v in g.local_bytes().items() if k != "gradients") for g in engine.groups)
    gradients = sum(
        (g.padded if row.gradient is Placement.PARTIAL else g.high - g.low) * g.master_dtype.itemsize for g in trainable
    )
    optimizer = sum(int((g.high - g.low) * engine.adoption.state_bytes_per_element) for g in trainable)
    largest = max(engine.units, key=lambda unit: unit.num_bytes)
    state = f"optimizer {size_words(optimizer)}" if optimizer else "optimizer as it is"
    return (
        f"zero{engine.stage} over {axis.size} ranks, per rank: parameters {size_words(parameters)}, "
        f"gradients {size_words(gradients)}, {state}; {len(engine.units)} units, the largest {largest.name} "
        f"({size_words(largest.num_bytes)}); sends {size_words(step_bytes(engine))} per step"
    )


def step_bytes(engine: ZeroEngine) -> int:
    """Bytes that a rank sends in one step of one micro-batch: the closed form of the stage over the padded groups.

    Stage 3 gathers a unit for its forward and again for its backward; the root unit, which stays gathered for the whole
    step, and units that need no backward count once.
    """
    size, total = engine.mesh.dp.size, 0
    for unit in engine.units:
        for group in unit.groups:
            parameters = ring_bytes(group.padded, group.compute_dtype.itemsize, size)
            if engine.row.parameter is Placement.SHARD:
                total += parameters if unit.name == ROOT else 2 * parameters
            if not group.trains:
                continue
            gradients = ring_bytes(group.padded, group.wire_dtype(accumulates=False).itemsize, size)
            total += gradients * (1 if group.sharded_state else 2)
            if engine.row.parameter is Placement.REPLICATE and group.sharded_state:
                total += parameters
    return total


def size_words(num_bytes: int) -> str:
    """Decimal units, as in the papers."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"
