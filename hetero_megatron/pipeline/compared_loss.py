"""What losses have in common that compare the model with another one: a reference (``preference.py``) or a teacher
(``distillation.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ComparedLoss:
    """Collects what a step or an evaluation tells about itself beside its loss, the facts."""

    def __init__(self) -> None:
        self._rehearsing = False
        self._facts: list[torch.Tensor] = []  # of micro-batches, [facts] each

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, the other model has not spoken, and nothing that is computed counts."""
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False

    def begin(self) -> None:
        """A step or an evaluation begins."""
        self._facts.clear()

    def _tell(self, facts: torch.Tensor) -> None:
        """``facts``: [facts], of one micro-batch or of a part of it."""
        if not self._rehearsing:
            self._facts.append(facts)

    def _summed(self, number: int, device: torch.device) -> torch.Tensor:
        """[number]: sums of the facts since :meth:`begin`."""
        return torch.stack(self._facts).sum(0) if self._facts else torch.zeros(number, device=device)
