"""Memory that a rank or a command did not get, in one sentence instead of a traceback. No torch."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hetero_megatron.errors import UserError

_ASKED = re.compile(r"(?:tried to|unable to) allocate ([\d.]+) ?(bytes|[KMGTPE]iB)", re.IGNORECASE)
_SIGNS = re.compile(
    r"allocate memory|out of memory|unable to allocate|failed to map segment|bad_alloc|MemoryError|start new thread"
)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50, "eib": 2**60}


class _Purpose(NamedTuple):
    """What memory was for, and what would need less of it."""

    text: str
    remedy: str


@contextmanager
def memory_for(purpose: str, remedy: str) -> Iterator[None]:
    """Context of allocations: where memory runs out in it, :func:`out_of_memory` says for what ``purpose``, such as
    "gathering layer 3", and what would need less."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if _is_memory(error):
            vars(error).setdefault("memory_purpose", _Purpose(purpose, remedy))
        raise


def out_of_memory(error: BaseException, rank: int | None = None) -> UserError | None:
    """What to tell the user where ``error`` says that memory ran out; None where it says something else.

    Known are Python's, NumPy's and the system's errors, those of torch's allocators, and libraries that could not be
    loaded; also behind an error that was raised in handling one.

    Args:
        rank: of a training run; None: another command.
    """
    memory_error: BaseException | None = error
    while memory_error is not None and not _is_memory(memory_error):
        memory_error = memory_error.__cause__ or memory_error.__context__
    if memory_error is None:
        return None
    device = type(memory_error).__name__ == "OutOfMemoryError"  # torch's, of whatever accelerator
    request = _ASKED.search(str(memory_error))
    size = f": {_size(float(request[1]) * _UNITS[request[2].lower()])} more were asked for" if request else ""
    memory_name = "memory of its accelerator" if device else "host memory"
    if rank is None:
        return UserError(f"this command is out of {memory_name}{size}", accepted="more memory, or a larger limit on it")
    if (purpose := vars(memory_error).get("memory_purpose")) is not None:
        return UserError(f"rank {rank} is out of {memory_name} in {purpose.text}{size}", accepted=purpose.remedy)
    remedy = "a smaller --micro-batch-size, --recompute-activations, a plan with fewer layers on this rank (--dry-run "
    remedy += f"shows what each needs), or {'optimizer: {offload: true} in the plan' if device else 'more memory'}"
    return UserError(f"rank {rank} is out of {memory_name}{size}", accepted=remedy)


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError | ImportError | OSError) and bool(_SIGNS.search(str(error)))


def _size(number: float) -> str:
    unit = next((u for u in ("EiB", "PiB", "TiB", "GiB", "MiB", "KiB") if number >= _UNITS[u.lower()]), "bytes")
    return f"{number / _UNITS[unit.lower()]:.4g} {unit}"
