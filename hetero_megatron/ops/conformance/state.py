"""Torch's settings that belong to the whole process: a kernel that changes one changes what others compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]

_SETTINGS: dict[str, _Setting] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, lambda _: torch.set_default_device(None)),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "precision of fp32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
}


class GlobalState:
    """Torch's settings and random numbers (of the CPU) at one moment."""

    def __init__(self) -> None:
        self._settings = {name: get() for name, (get, _) in _SETTINGS.items()}
        self._random = torch.get_rng_state()

    def restore(self, random_too: bool) -> list[str]:
        """Put everything back.

        Args:
            random_too: random numbers that were drawn are a change as well.

        Returns:
            What had been changed, in words.
        """
        changes = []
        for name, (get, put) in _SETTINGS.items():
            before, now = self._settings[name], get()
            if now != before:
                changes.append(f"changed torch's {name} from {before} to {now}")
                put(before)
        if not torch.equal(torch.get_rng_state(), self._random):
            torch.set_rng_state(self._random)
            if random_too:
                changes.append("changed the state of torch's random numbers, and claims to be deterministic")
        return changes
