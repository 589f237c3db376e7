"""Platforms of the ranks of a pool. ``walled`` is a vendor whose library is gloo, for its own ranks; ``reaching:V``
is another one, V, which reaches others by a stand-in for FlagCX."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hetero_megatron.comm import Comm
from hetero_megatron.plans import Plan
from hetero_megatron.platform import CPU, Platform
from hetero_megatron.platform.direct import DirectBackend
from tests.support.paths import ROOT

BACKEND = "walled"
PLUGINS = ROOT / "plugins"


class Walled(CPU):
    name, vendor, library, backends = "walled", "Walled Inc.", "wccl", (BACKEND,)

    def load(self) -> None:
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


class Reaching(Walled):
    """One of several vendors of which each has walls, and all have FlagCX."""

    brought = (DirectBackend("flagcx", "flagcx", ("walled",)),)

    def __init__(self, vendor: str) -> None:
        self.vendor = vendor  # type: ignore[misc]


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Every member leaves its vendor in the store; only its own ranks make such groups."""
    store.set(f"walled/{rank}", Walled.vendor)
    store.wait([f"walled/{r}" for r in range(size)], timeout)
    return dist.ProcessGroupGloo(dist.PrefixStore("walled", store), rank, size, timeout)


def with_attention(plan: Plan, device: torch.device, *more: str) -> Plan:
    """On an emulated device, the plan with attention, and what else is named, by its definition, which no device runs
    unasked."""
    if device.type == "cpu":
        return plan
    asked = tuple((name, "reference") for name in ("attention", *more))
    pipelines = tuple(
        replace(p, stages=tuple(replace(s, kernels=asked) for s in p.stages)) for p in plan.pipelines
    )  # fmt: skip
    return replace(plan, pipelines=pipelines)


def load_as_asked(comm: Comm, eager: bool) -> None:
    """What a run does before it uses its device (``Accelerator.load_eagerly``), for a rank that trains one plan after
    another."""
    if comm.accelerator is None:
        return
    for name in comm.accelerator.eager_settings:
        os.environ.pop(name, None)
    if eager:
        comm.accelerator.load_eagerly()


@functools.cache
def build_emulated() -> None:
    """Build the emulated device unless it is there; the test is skipped where there is no compiler."""
    told = {**os.environ, "PYTHONPATH": str(PLUGINS / "emulated_vendor")}
    command = [sys.executable, "-m", "hetero_emulated_vendor.build"]
    done = subprocess.run(command, capture_output=True, text=True, env=told)
    if "no C++ compiler" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr


def platform(name: str, rank: int) -> Platform:
    """``cpu``, ``walled``, ``reaching:VENDOR``, or ``emulated``: a device of plugins/emulated_vendor, which has to be
    built; with bad habits after a colon (``emulated:lazy-loading,slots=8``)."""
    if name == "cpu":
        return Platform(torch.device("cpu"), "gloo")
    if name == "walled":
        vendor = Walled()
        vendor.load()
        return Platform(torch.device("cpu"), BACKEND, vendor)
    kind, _, habits = name.partition(":")
    if kind == "reaching":
        sys.path.insert(0, str(ROOT / "tests" / "support" / "flagcx_stub"))
        reaching = Reaching(habits)
        reaching.load()
        return Platform(torch.device("cpu"), BACKEND, reaching)
    assert kind == "emulated", name
    os.environ["HETERO_EMULATED_HABITS"] = habits
    sys.path.insert(0, str(PLUGINS / "emulated_vendor"))
    from hetero_emulated_vendor.plugin import EmulatedVendor

    emulated = EmulatedVendor()
    emulated.load()
    return Platform(emulated.device(rank % emulated.device_count()), "cpu:gloo,emu:emuccl", emulated)
