"""Tell the C allocator to keep what a training step frees.

By default glibc maps every large block afresh from the kernel and gives it back when it is freed. A training step
frees and takes hundreds of megabytes again and again (logits, activations, gathered units), and each time every page of
4 KiB costs a fault that zeroes it: filling a fresh block of 64 MB took 41 ms on the machine of the benchmarks, one that
was kept 6 ms.

The price is that the process keeps its peak until it ends. A process that only trains wants that, so strategies ask for
it on the CPU; a plain loop may call it first thing. CUDA has a caching allocator of its own and needs nothing.
"""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BELOW = 1 << 30  # bytes of a single block


def keep_freed_memory() -> bool:
    """Make glibc serve blocks up to 1 GiB from memory that it keeps; returns whether that was possible.

    It cannot be undone in this process. On other C libraries nothing happens.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEEP_BELOW)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
