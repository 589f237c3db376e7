"""Refusals of plans that were built from flags: they name the flag that said it, and which stage of it is meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.plan.source import Source

PATH = re.compile(r"(?:pipelines\[\d+\]\.stages\[(\d+)\]\.)?(\w+).*")


def flag_error(flag: str, value: object, problem: str, accepted: str = "") -> UserError:
    """A UserError about a flag, given by the name of its field."""
    return UserError(
        problem, field="--" + flag.replace("_", "-"), value=value, accepted=accepted, where="command line"
    )


@dataclass(frozen=True)
class Blame:
    """``flag`` (by the name of its field) with ``value`` made something of the plan; ``place``: what part of it;
    ``accepted``: what of the flag would be, where the law would say it of a plan."""

    flag: str
    value: object
    place: str = ""
    accepted: str = ""


@dataclass(frozen=True)
class FlagSource(Source):
    """Laws of ``validate`` are reported by flags: ``blame(key, stage)`` says which one made a key of a stage of every
    pipeline (as in a plan file), or of the plan (stage -1); None: none did."""

    blame: Callable[[str, int], Blame | None] = lambda key, stage: None

    def error(self, problem: str, path: str, value: Any = None, accepted: str = "") -> UserError:
        match = PATH.fullmatch(path)
        found = self.blame(match[2], int(match[1] or -1)) if match else None
        if found is None:
            return super().error(problem, path, value, accepted)
        text = f"{found.place}: {problem}" if found.place else problem
        return flag_error(found.flag, found.value, text, found.accepted or accepted)
