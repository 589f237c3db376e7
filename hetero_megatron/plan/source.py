"""Where the values of a plan were read: path, line and file for messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_megatron.errors import UserError


@dataclass(frozen=True)
class Source:
    """Where the values of a canonical plan were read, for messages.

    Args:
        file: name of the file; empty for plans that were built by code.
        lines: line of each path as spelled.
        pipelines: canonical pipeline -> pipeline as spelled (they differ after ``repeat``).
    """

    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    pipelines: tuple[int, ...] = ()

    def error(self, problem: str, path: str, value: Any = None, accepted: str = "") -> UserError:
        """A UserError about a canonical path, reported by the path and line of the spelling."""
        spelled = self.spelled(path)
        return UserError(problem, field=spelled, value=value, accepted=accepted, where=self.where(spelled))

    def spelled(self, path: str) -> str:
        match = re.match(r"pipelines\[(\d+)\]", path)
        if match and self.pipelines:
            return f"pipelines[{self.pipelines[int(match[1])]}]" + path[match.end() :]
        return path

    def where(self, path: str) -> str:
        """file:line of a path, or of the nearest value around it."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        line = self.lines.get(path, 0)
        return f"{self.file}:{line}" if self.file and line else self.file
