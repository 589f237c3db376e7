"""A kernel under test, and what a check says about it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hetero_megatron.ops.conformance.compare import mismatch
from hetero_megatron.ops.spec import Kernel, OpSpec

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
        for name, (get, set_value) in _SETTINGS.items():
            saved_value, present_value = self._settings[name], get()
            if present_value != saved_value:
                changes.append(f"changed torch's {name} from {saved_value} to {present_value}")
                set_value(saved_value)
        if not torch.equal(torch.get_rng_state(), self._random):
            torch.set_rng_state(self._random)
            if random_too:
                changes.append("changed the state of torch's random numbers, and claims to be deterministic")
        return changes


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


@dataclass(frozen=True)
class CheckHooks:
    """How those who run checks follow them.

    Args:
        begin: told (check, dtype, case) before each check: should it end the process, it can be named.
        synchronize: waits for the device, so that an error is that of the call that made it.
    """

    begin: Callable[[str, str, str], None] = lambda check, dtype, case: None
    synchronize: Callable[[], None] = lambda: None


@dataclass
class Subject:
    """A kernel under test on one device, with one dtype. ``changes``: to global state, in words."""

    spec: OpSpec
    kernel: Kernel
    device: torch.device
    dtype: torch.dtype
    watch: CheckHooks = CheckHooks()
    changes: list[str] = field(default_factory=list)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def finding(self, check: str, case: str, problem: str | None) -> Finding:
        return Finding(str(self.kernel), check, self.dtype_name, case, FAIL if problem else PASS, problem or "")

    def attempt(self, check: str, case: str, call: Callable[[], Any]) -> tuple[Any, str]:
        """(what ``call`` returned, or None and why); torch's global state is as before."""
        self.watch.begin(check, self.dtype_name, case)
        state = GlobalState()

        def complete() -> Any:
            returned = call()
            self.watch.synchronize()
            return returned

        outcome = attempt(complete)
        self.changes += state.restore(self.kernel.capability.deterministic)
        return outcome


def attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """(what ``call`` returned, or None and why). SystemExit and its like are caught too: kernels are others' code."""
    try:
        return call(), ""
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        origin = f" ({frames[-1].name}, {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
        return None, f"raised {describe(error)}{origin}"


def describe(error: BaseException) -> str:
    """Class and first line of an exception whose own code may fail."""
    try:
        text = (str(error).strip().splitlines() or [""])[0]
    except BaseException as text_error:
        text = f"(its message cannot be read: {type(text_error).__name__})"
    return f"{type(error).__name__}: {text}"


def judge_all(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], cap: float, factor: float,
    names: Sequence[str] = (),
) -> str:  # fmt: skip
    if len(got) != len(want):
        return f"{len(got)} tensors, not {len(want)}"
    for i, (g, w, e) in enumerate(zip(got, want, eager, strict=True)):
        problem = mismatch(g, w, e, cap, factor)
        if problem:
            return f"{names[i]}: {problem}" if names else (f"result {i}: {problem}" if len(got) > 1 else problem)
    return ""
