"""Tiny models for the law of parity: every strategy must train each of them exactly as one process does.

    case = ZOO["llama_tied"]
    reference = reference_steps(case, batches_per_step=2, world=4, steps=3, optimizer_factory=torch.optim.AdamW)

Everything is float64 and small: a step takes milliseconds, and rounding is no excuse.
"""

from tests.zoo import experts, gan, hf, plain
from tests.zoo.case import Batch, Case
from tests.zoo.reference import (
    Reference,
    assert_close,
    assert_same_run,
    build,
    global_batch,
    local_batch,
    reference_steps,
)

ZOO: dict[str, Case] = {case.name: case for case in (*hf.CASES, *plain.CASES, *experts.CASES)}

HEAVY_IMPORTS = hf.HEAVY_IMPORTS  # what worker processes had better import once, before they are forked


def case_named(name: str) -> Case:
    return ZOO[name]


__all__ = [
    "HEAVY_IMPORTS",
    "ZOO",
    "Batch",
    "Case",
    "Reference",
    "assert_close",
    "assert_same_run",
    "build",
    "case_named",
    "gan",
    "global_batch",
    "local_batch",
    "reference_steps",
]
