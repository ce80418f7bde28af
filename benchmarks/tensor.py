"""Tensor parallelism of lightning_dist beside torch's DTensor `parallelize_module`, in one interleaved run.

    python benchmarks/tensor.py                 # 60M parameters, fp32, 2 ranks
    python benchmarks/tensor.py --quick         # a smoke run

All ranks of a tensor-parallel system compute the same global batch, those of DDP a part of it each: the arithmetic of
a step is the same, and so should its loss be.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: let the package be found from the root of the project instead
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.driver import Comparison, main

TENSOR = Comparison(
    "tensor",
    "Tensor parallelism",
    systems=("ddp", "ddp-twin", "tp", "tp-sp", "dtensor", "dtensor-sp"),
    quick=("ddp", "tp", "tp-sp", "dtensor"),
)

if __name__ == "__main__":
    sys.exit(main(TENSOR))
