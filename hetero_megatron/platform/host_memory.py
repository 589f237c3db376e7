"""How the C library treats freed memory of a process that trains on the CPU."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # parameters of glibc's mallopt
_TOP_PAD_BYTES = 16 << 20
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, for the next tensors, instead of giving it back to the system.

    A step allocates and frees hundreds of MiB; a page that comes back from the system costs a fault and is zeroed.
    Without effect (False) where the C library has no ``mallopt``, and where the user has chosen by glibc's variables.
    """
    if any(name in os.environ for name in _CHOSEN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, _TOP_PAD_BYTES), (_MMAP_MAX, 0))
    return all(bool(mallopt(name, value)) for name, value in settings)
