"""One key per kernel in Triton's cache, whatever is launched first."""

from __future__ import annotations

import sys

from triton.runtime.jit import JITFunction


def make_keys() -> None:
    """Make Triton's keys of all functions of this package that are imported, in one order.

    Triton hashes a kernel with the constants of the functions that it calls, but only of those that had their own key
    before (``JITFunction.cache_key`` of 3.6 and 3.7). So a kernel would have another key in another process, which
    launches others before it, and be compiled again though it lies in the cache."""
    for name in sorted(name for name in sys.modules if name.startswith(f"{__package__}.")):
        for value in list(vars(sys.modules[name]).values()):
            if isinstance(value, JITFunction):
                value.cache_key  # noqa: B018  # a property that keeps what it makes
