"""The environment variables a process under test starts with.

Tests must not see which launcher started pytest, nor what an earlier test of pytest's own process left
behind, so everything that describes a rank or a rendezvous is removed and the few settings a quiet CPU run
needs are added.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_DESCRIBES_A_RANK = {
    "GLOBAL_RANK",
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "WORLD_SIZE",
}
_BELONGS_TO_A_LAUNCHER = ("PL_", "PMI_", "OMPI_", "PYTEST_", "SLURM_", "TORCHELASTIC_")

QUIET_CPU_RUN = {
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def clean_environment(search_path: Iterable[Path]) -> dict[str, str]:
    """This process's environment, cleaned, with exactly ``search_path`` as PYTHONPATH."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _DESCRIBES_A_RANK and not name.startswith(_BELONGS_TO_A_LAUNCHER)
    }
    return {**kept, **QUIET_CPU_RUN, "PYTHONPATH": os.pathsep.join(map(str, search_path))}
