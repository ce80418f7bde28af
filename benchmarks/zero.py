"""ZeRO stages of lightning_dist beside the same stages of torch and DeepSpeed, in one interleaved run.

python benchmarks/zero.py                   # all systems, 60M parameters, fp32
python benchmarks/zero.py --quick           # a smoke run
python benchmarks/zero.py --systems zero3,fsdp2-zero3 --precision bf16-mixed
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: let the package be found from the root of the project instead
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.driver import Comparison, main
from benchmarks.systems import SYSTEMS

ZERO = Comparison(
    "zero",
    "ZeRO stages",
    systems=tuple(name for name, system in SYSTEMS.items() if not system.whole_batch),
    quick=("ddp", "zero1", "zero2", "zero3", "fsdp2-zero3"),
)

if __name__ == "__main__":
    sys.exit(main(ZERO))
