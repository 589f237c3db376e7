"""Bytes of live tensors, by watching every operator: exact for fake tensors, which hold none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """Counts the storages of tensors made while it is active, until they are freed.

    Attributes:
        live, peak: bytes now, and at most so far.
        host: while this is set, new tensors are in the host's memory: they never count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.host = False
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._watch(value.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        # What does not count is known as well: an operator in place returns it again.
        size = 0 if self.host else storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        self._remember(storage, size)

    def _remember(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        self._alive[key] = weakref.ref(storage, lambda _: self._freed(key, size)), size

    def resized(self, tensor: torch.Tensor) -> None:
        """The memory of a tensor was given back, or is there again."""
        storage = tensor.untyped_storage()
        size, (_, known_size) = storage.nbytes(), self._alive[storage._cdata]
        self.live += size - known_size
        self.peak = max(self.peak, self.live)
        self._remember(storage, size)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are in the host's memory: they do not count, nor does what was the peak with them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata in self._alive:
                self.live -= self._alive[storage._cdata][1]
                self._remember(storage, 0)
        self.peak = self.live

    def _freed(self, key: int, size: int) -> None:
        if self._alive.pop(key, None) is not None:
            self.live -= size
