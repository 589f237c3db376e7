"""A kernel under test, and what a check says about it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hetero_megatron.ops.conformance.compare import judge
from hetero_megatron.ops.kernel import Kernel
from hetero_megatron.ops.spec import OpSpec

PASS, FAIL, SKIP = "pass", "FAIL", "skip"


@dataclass(frozen=True)
class Finding:
    """One check of one kernel."""

    kernel: str
    check: str
    dtype: str
    case: str
    status: str
    detail: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass
class Subject:
    """A kernel under test on one device, with one dtype."""

    spec: OpSpec
    kernel: Kernel
    device: torch.device
    dtype: torch.dtype

    def finding(self, check: str, case: str, problem: str | None) -> Finding:
        name = str(self.dtype).removeprefix("torch.")
        return Finding(str(self.kernel), check, name, case, FAIL if problem else PASS, problem or "")


def attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """(what ``call`` returned, or None and why)."""
    try:
        return call(), ""
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].name}, {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
        text = (str(error).strip().splitlines() or [""])[0]
        return None, f"raised {type(error).__name__}: {text}{where}"


def judge_all(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], cap: float, factor: float,
    names: Sequence[str] = (),
) -> str:  # fmt: skip
    if len(got) != len(want):
        return f"{len(got)} tensors, not {len(want)}"
    for i, (g, w, e) in enumerate(zip(got, want, eager, strict=True)):
        problem = judge(g, w, e, cap, factor)
        if problem:
            return f"{names[i]}: {problem}" if names else (f"result {i}: {problem}" if len(got) > 1 else problem)
    return ""
