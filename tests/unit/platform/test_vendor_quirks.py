"""First steps through platforms whose torch module is a stub after its documentation; tensors are the CPU's."""

from __future__ import annotations

import sys
import types
from datetime import timedelta
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.model import initial_values
from hetero_megatron.ops.optimizer_ops import adamw_aten
from hetero_megatron.parallel.optimizer import AdamW
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.platform import CPU, Accelerator, Platform
from hetero_megatron.platform.conformance import FAIL, check_platform
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.runtime import Runtime
from tests.support.parity import RandomSamples, fixed_case
from tests.support.small_plans import LLAMA, pipe, plan, stage


class Mps(types.ModuleType):
    """torch.mps of torch 2.13: one queue; events without a stream; no device to choose or ask about."""

    def __init__(self) -> None:
        super().__init__("torch.mps")
        self.event = types.SimpleNamespace(Event=_MpsEvent)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def synchronize(self) -> None: ...
    def empty_cache(self) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def recommended_max_memory(self) -> int:
        return 16 << 30

    def current_allocated_memory(self) -> int:
        return 1 << 20

    driver_allocated_memory = current_allocated_memory
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)


class _MpsEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        assert self.recorded

    def elapsed_time(self, end_event: _MpsEvent) -> float:
        assert self.recorded and end_event.recorded
        return 1.0


class Xpu(types.ModuleType):
    """torch.xpu: as torch.cuda, but its capability is a table, and Arc's says that there is no fp64."""

    def __init__(self) -> None:
        super().__init__("torch.xpu")

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None: ...
    def synchronize(self) -> None: ...

    def get_device_name(self, index: int) -> str:
        return "Intel(R) Arc(TM) B580 Graphics"

    def get_device_capability(self, index: int) -> dict[str, Any]:
        return {"architecture": 21479309312, "has_fp64": False, "has_atomic64": True, "gpu_eu_count": 160}

    def get_device_properties(self, index: int) -> Any:
        return types.SimpleNamespace(total_memory=12 << 30, has_fp64=False)

    def max_memory_allocated(self, index: int) -> int:
        return 1

    def Stream(self) -> Any:
        return _XpuStream()

    current_stream = Stream

    def stream(self, stream: Any) -> Any:
        return CPU().on_stream(stream)

    def Event(self, enable_timing: bool = False) -> Any:
        return _XpuEvent()

    def manual_seed_all(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)


class _XpuStream:
    def wait_event(self, event: _XpuEvent) -> None:
        assert event.recorded

    def wait_stream(self, stream: _XpuStream) -> None: ...
    def synchronize(self) -> None: ...


class _XpuEvent(_MpsEvent):
    def record(self, stream: Any = None) -> None:
        self.recorded = True


class Npu(Xpu):
    """torch.npu, which torch_npu adds: as torch.cuda, without a capability; a chip's properties have no fp64."""

    def get_device_name(self, index: int) -> str:
        return "Ascend910B3"

    def get_device_capability(self, index: int) -> None:  # warns, and returns nothing
        return None

    def get_device_properties(self, index: int) -> Any:
        return types.SimpleNamespace(name="Ascend910B3", total_memory=64 << 30)


class Radeon(Xpu):
    """torch.cuda of a build for ROCm, with a card for gamers: its name for kernels is no capability."""

    def get_device_name(self, index: int) -> str:
        return "AMD Radeon RX 7900 XTX"

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return 11, 0

    def get_device_properties(self, index: int) -> Any:
        return types.SimpleNamespace(gcnArchName="gfx1100", total_memory=24 << 30)


STUBS = {"amd": Radeon, "apple": Mps, "ascend": Npu, "intel": Xpu}
ARCHS = {"amd": (11, 0, 0), "ascend": (910, 3)}  # what kernels may ask for


@pytest.fixture(params=sorted(STUBS))
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    found = load_plugins().platforms[request.param]
    stub = STUBS[request.param]()
    monkeypatch.setattr(type(found), "module", lambda self: stub)  # torch itself uses torch.cuda
    if not hasattr(torch, found.device_type):
        monkeypatch.setattr(torch, found.device_type, stub, raising=False)
    monkeypatch.setattr(torch.version, "hip", "6.4" if request.param == "amd" else None)
    if found.adapter:
        module = types.ModuleType(found.adapter)
        module.__spec__ = ModuleSpec(found.adapter, None)
        monkeypatch.setitem(sys.modules, found.adapter, module)
    monkeypatch.setattr(type(found), "host_memory", lambda self, size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(type(found), "used_on", lambda self, stream, *tensors: None)  # streams of the CPU keep nothing
    return found


def first_losses(accelerator: Accelerator | None) -> list[float]:
    case = fixed_case(LLAMA, plan([pipe(1, 3, stage([0], [0, 3]))]), dtype="fp32")
    spec = from_hf_config(case.model)
    compiled = CompiledPlan(plan_from_dict(case.plan, spec), spec)
    comm = Comm(0, torch.device("cpu"), timedelta(seconds=5))
    comm.accelerator = accelerator
    comm.create_groups(compiled.groups)
    runtime = Runtime(
        compiled, comm, torch.float32, lambda t, box: initial_values(t, box, spec, 0),
        lambda groups: AdamW(groups, adamw_aten, (0.9, 0.95), 1e-8),
    )  # fmt: skip
    fetch, size = RandomSamples(case, spec.vocab_size).fetch, compiled.plan.global_batch_size
    return [runtime.train_step(fetch, i * size, size, 1e-3, clip_grad=1.0, step=i + 1).loss for i in range(2)]


def test_first_steps_are_those_of_the_processor(accelerator: Accelerator) -> None:
    assert accelerator.available() and accelerator.chip() and accelerator.total_memory() > 0
    assert accelerator.arch() == ARCHS.get(accelerator.name, ())
    assert (torch.float64 in accelerator.dtypes) == (accelerator.name == "amd")
    Platform(torch.device("cpu"), "gloo", accelerator).synchronize()
    assert first_losses(accelerator) == first_losses(None)


def test_they_pass_the_platform_check(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "device", lambda index=0: torch.device("cpu"))  # tensors need a real one
    assert [f for f in check_platform(accelerator) if f.status == FAIL] == []
