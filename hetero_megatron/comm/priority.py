"""Longer turns on a core for compute.

Several emulated ranks share a core. Where the kernel lets them interrupt each other, caches are lost, and the slower a
chip, the more often that happens to it: the same work took slow ranks 4 to 11 % more CPU time than fast ones. A longer
time slice changes no rank's share of the core; threads with the usual slice, such as gloo's, still get it at once.

(A real-time priority is no way: gloo's threads spin on connections whose lock the computing thread holds, and where
they go first it never gets the core to give the lock back; where compute goes first, transfers starve.)
"""

from __future__ import annotations

import ctypes
import platform
import struct

SLICE_NANOSECONDS = 100_000_000  # the kernel's maximum
_SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_ATTRIBUTES = struct.Struct("IIQiIQQQII")  # struct sched_attr: size, policy, flags, nice, priority, runtime, …


def long_turns() -> bool:
    """Ask for the longest time slice for this thread; whether the kernel grants it (Linux 6.12 or newer)."""
    numbers = _SYSCALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if numbers is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, 0, 0, 0, SLICE_NANOSECONDS, 0, 0, 0, 0)
    if libc.syscall(numbers[0], 0, wanted, 0):
        return False
    got = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if libc.syscall(numbers[1], 0, got, _ATTRIBUTES.size, 0):
        return False
    return int(_ATTRIBUTES.unpack(got.raw)[5]) == SLICE_NANOSECONDS
