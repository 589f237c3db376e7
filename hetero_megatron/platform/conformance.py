"""What a platform plugin must answer for; part of ``hetero-megatron plugins check``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hetero_megatron.ops.conformance import FAIL, PASS, SKIP, Finding
from hetero_megatron.ops.conformance.subject import attempt
from hetero_megatron.platform.accelerator import Accelerator


def check_platform(accelerator: Accelerator, begin: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """Every question of the interface, asked once; devices that are not here are only checked for what is data.

    Args:
        begin: told the name of each check before it runs.
    """
    name = f"platform {accelerator.name}"

    def finding(check: str, run: Callable[[], str | None]) -> Finding:
        begin(check)
        problem_found, problem = attempt(run)
        problem = problem or problem_found or ""
        return Finding(name, check, "", "", FAIL if problem else PASS, problem)

    yield finding("data", lambda: _data(accelerator))
    begin("device")
    found_device, problem = attempt(lambda: accelerator.device(0) if accelerator.available() else None)
    if found_device is None:
        status, why = (FAIL, problem) if problem else (SKIP, accelerator.absence())
        yield Finding(name, "device", "", "", status, why)
        return
    device: torch.device = found_device
    yield finding("memory", lambda: _memory(accelerator))
    yield finding("streams and events", lambda: _events(accelerator, device))
    yield finding("random numbers", lambda: _random(accelerator, device))
    yield finding("dtypes", lambda: _dtypes(accelerator, device))
    yield finding("version of the chip", lambda: _arch(accelerator))


def _data(a: Accelerator) -> str | None:
    for key in ("name", "vendor", "device_type"):
        if not getattr(a, key):
            return f"{key} is not set"
    if not a.backends:
        return "backends: names no process-group backend"
    if not a.dtypes or not all(isinstance(d, torch.dtype) for d in a.dtypes):
        return "dtypes: must be torch dtypes"
    return None


def _memory(a: Accelerator) -> str | None:
    if a.device_count() < 1:
        return "available, but device_count() is 0"
    total, peak = a.total_memory(0), a.peak_memory(0)
    return None if peak >= 0 and total > 0 else f"total {total}, peak {peak}"


def _events(a: Accelerator, device: torch.device) -> str | None:
    first, last = a.event(timing=True), a.event(timing=True)
    with a.on_stream(a.stream()):
        first.record()
        (torch.ones(64, device=device) * 2).sum()
        last.record()
    a.synchronize()
    return None if first.elapsed_time(last) >= 0 else "the later event came first"


def _random(a: Accelerator, device: torch.device) -> str | None:
    saved_state = a.rng_state()
    a.seed(7)
    state = a.rng_state()
    first_draw = torch.rand(8, device=device)
    a.set_rng_state(state)
    second_draw = torch.rand(8, device=device)
    a.set_rng_state(saved_state)
    return None if torch.equal(first_draw, second_draw) else "the same state gave other numbers"


def _dtypes(a: Accelerator, device: torch.device) -> str | None:
    for dtype in a.dtypes:
        x = torch.ones(4, 4, device=device).to(dtype)
        if float((x @ x).sum()) != 64.0:
            return f"{dtype}: a product of ones is wrong"
    return None


def _arch(a: Accelerator) -> str | None:
    arch = a.arch(0)
    return None if isinstance(arch, tuple) and all(isinstance(x, int) for x in arch) else f"arch() is {arch!r}"
