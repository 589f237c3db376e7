"""Process-group backends that reach chips of several vendors, for platforms that other plugins bring."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from dataclasses import dataclass

import torch.distributed as dist

from hetero_megatron.errors import UserError


@dataclass(frozen=True)
class DirectBackend:
    """One such backend.

    Attributes:
        name: as ``torch.distributed`` knows it once ``module`` is imported.
        module: registers it; platforms: names of those whose devices it moves the memory of.
    """

    name: str
    module: str
    platforms: tuple[str, ...]

    def installed(self) -> bool:
        """Whether the module is there; nothing is imported."""
        return importlib.util.find_spec(self.module.partition(".")[0]) is not None

    def load(self) -> None:
        """Have it registered; what its module changes of torch counts from here on.

        Raises:
            UserError: its module cannot be imported, or registers no such backend.
        """
        try:
            with contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(self.module)
        except Exception as error:  # a library for another torch or driver may raise anything
            text = (str(error).strip().splitlines() or [""])[0]
            raise self._unusable(f"{self.module} raised {type(error).__name__}: {text}") from error
        if self.name not in dist.Backend.backend_list:
            raise self._unusable(f"{self.module} registers no backend of this name")

    def _unusable(self, problem: str) -> UserError:
        accepted = f"a {self.module} built for this torch and device, or --transport bridge"
        return UserError(problem, field="direct backend", value=self.name, accepted=accepted)
