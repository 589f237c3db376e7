"""Memory that tells: every buffer lies between guard bands, and what was not written is NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Elements on each side: as many as a block of a kernel that forgot its mask stores too many.
GUARD = 16_384
OUT_OF_BOUNDS = "wrote out of bounds"
_INTEGER = 0x5A5A5A  # stands for NaN in integers; larger than any index that is meant

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.empty_strided.default,
    _aten.new_empty_strided.default, _aten.empty_permuted.default,
}  # fmt: skip
_FILLED = {
    _aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.full.default,
    _aten.full_like.default, _aten.new_full.default, _aten.ones.default, _aten.ones_like.default,
}  # fmt: skip


@dataclass
class _Buffer:
    base: torch.Tensor
    before: torch.Tensor  # a copy of the guards (or of everything, for inputs)
    whole: bool
    what: str


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


class Sandbox(TorchDispatchMode):
    """While active, ``torch.empty`` and its like give guarded memory full of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[_Buffer] = []

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            return self._guarded(out, None, "an output")
        if func in _FILLED:
            return self._guarded(out, out, "an output")
        return out

    def place(self, x: torch.Tensor, may_change: bool = False) -> torch.Tensor:
        """``x`` with the same strides between guards, gaps included; it may not change unless ``may_change``."""
        return self._guarded(x, x, "an argument", whole=not may_change)

    def _guarded(
        self, like: torch.Tensor, values: torch.Tensor | None, what: str, whole: bool = False
    ) -> torch.Tensor:
        if like.dtype == torch.bool or like.is_quantized:
            return like
        size, stride = like.size(), like.stride()
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if like.numel() else 0
        fill = float("nan") if like.is_floating_point() else _INTEGER % (torch.iinfo(like.dtype).max + 1)
        base = torch.full((span + 2 * GUARD,), fill, dtype=like.dtype, device=like.device)
        inner = base.as_strided(size, stride, GUARD)
        if values is not None and like.numel():
            if 0 in stride and any(n > 1 and s == 0 for n, s in zip(size, stride, strict=True)):
                base[GUARD:-GUARD] = values.reshape(-1)[0]  # an expanded scalar
            else:
                inner.copy_(values)
        before = base.clone() if whole else torch.cat([base[:GUARD], base[-GUARD:]])
        self._buffers.append(_Buffer(base, before, whole, what))
        return inner

    def damage(self) -> list[str]:
        """What was written that must not be; empty if nothing."""
        found = []
        for b in self._buffers:
            if b.whole and torch.equal(_bits(b.base), _bits(b.before)):
                continue
            guards = torch.cat([b.base[:GUARD], b.base[-GUARD:]])
            before = torch.cat([b.before[:GUARD], b.before[-GUARD:]])
            if not torch.equal(_bits(guards), _bits(before)):
                index = int((_bits(guards) != _bits(before)).nonzero()[0]) // b.base.element_size()
                where = f"{GUARD - index} before" if index < GUARD else f"{index - GUARD + 1} after"
                found.append(f"{OUT_OF_BOUNDS}: {where} {b.what} of {b.base.numel() - 2 * GUARD} elements")
            elif b.whole:
                found.append(f"changed {b.what}, which it does not declare")
        return list(dict.fromkeys(found))


class Unguarded:
    """Memory as it is, for a quick look: arguments are copies, and nothing is noticed of writes beyond them. (A
    dispatch mode imports torch's compiler first, which takes seconds.)"""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def place(self, x: torch.Tensor, may_change: bool = False) -> torch.Tensor:
        """A copy with the same strides."""
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device).copy_(x)

    def damage(self) -> list[str]:
        return []


Box = type[Sandbox] | type[Unguarded]
