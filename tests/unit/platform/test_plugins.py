"""Discovery, isolation and API versions of plugins; platforms against a stub device; the sub-command."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron.cli.main import main
from hetero_megatron.cluster import load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.ops.conformance import FAIL, speed
from hetero_megatron.parallel.device_graphs import GraphPool
from hetero_megatron.platform import CPU, Accelerator, Platform, choose_platform
from hetero_megatron.platform.conformance import check_platform
from hetero_megatron.platform.plugins import BUILT_IN, PluginSource, discover, load, load_plugins
from hetero_megatron.predictor.cost.rates import load_rates


def write(folder: Path, name: str, text: str) -> str:
    """A plugin module ``name`` in a package of its own; returns its dotted name."""
    package = folder / f"pkg_{name}"
    package.mkdir()
    marker = folder / f"{name}.imported"
    (package / "__init__.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    (package / "plugin.py").write_text(textwrap.dedent(text))
    return f"pkg_{name}.plugin"


GOOD = """
    from hetero_megatron.platform import CPU
    HETERO_PLUGIN_API = 1

    class Chip(CPU):
        name = "chip"

    def register(api):
        api.platform(Chip())
"""
BROKEN = {
    "old": ("HETERO_PLUGIN_API = 0\ndef register(api): pass\n", "it is for plugin API 0; this version speaks 1", False),
    "none": ("def register(api): pass\n", "it does not say HETERO_PLUGIN_API = 1", False),
    "syntax": ("HETERO_PLUGIN_API = 1\ndef register(api:\n", "SyntaxError: plugin.py:2", False),
    "raises": ("HETERO_PLUGIN_API = 1\nimport nothing_like_this\n", "ModuleNotFoundError: No module named", True),
    "no_register": ("HETERO_PLUGIN_API = 1\n", "AttributeError", True),
    "not_a_kernel": ("HETERO_PLUGIN_API = 1\ndef register(api): api.kernel(1)\n", "AssertionError: not a Kernel", True),
    "exits": ("HETERO_PLUGIN_API = 1\nimport sys\nsys.exit('no licence')\n", "SystemExit: no licence", True),
    "no_driver": (
        GOOD.replace('"chip"', '"chip"\n\n        def available(self):\n            raise RuntimeError("no driver")'),
        "RuntimeError: no driver", True,
    ),
    "nameless": (
        "from hetero_megatron.ops import Kernel\nHETERO_PLUGIN_API = 1\n"
        "def register(api): api.kernel(Kernel('rope', '', 'vendor', print, print))\n", "lacks a provider's name", True,
    ),
    "taken": (GOOD.replace('"chip"', '"cpu"'), "platform cpu is registered already", True),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_isolated_and_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, says, imported = BROKEN[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = [write(tmp_path, name, text), write(tmp_path, f"good_{name}", GOOD)]
    monkeypatch.setenv("HETERO_PLUGINS", ",".join(modules))
    found = load_plugins()
    (broken,) = found.broken()
    assert broken.source.module == modules[0] and says in broken.error, broken.error
    assert "chip" in found.platforms and found.find(modules[1]).ok
    assert (tmp_path / f"{name}.imported").exists() == imported, "a plugin for another version must not run"


def test_what_a_plugin_prints_does_not_end_in_what_a_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "HETERO_PLUGIN_API = 1\nprint('hello')\ndef register(api): print('registered')\n"
    monkeypatch.setenv("HETERO_PLUGINS", write(tmp_path, "chatty", text))
    assert main(["plugins", "list", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["plugins"] and {"hello", "registered"} <= set(shown.err.splitlines())


def test_a_module_that_is_not_there_is_named() -> None:
    assert "no module nowhere.plugin" in load(PluginSource("nowhere", "nowhere.plugin", "environment")).error


def test_discovery_order_and_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    found = discover({"HETERO_PLUGINS": " a.b , hetero_plugins.cpu,"})
    assert [s.name for s in found[: len(BUILT_IN)]] == list(BUILT_IN)
    assert [s.module for s in found if s.origin == "environment"] == ["a.b"]
    assert all(p.ok for p in load_plugins(found[: len(BUILT_IN)]).plugins)


def test_registration_is_repeatable_in_one_process() -> None:
    one, two = load_plugins(), load_plugins()
    assert list(one.platforms) == list(two.platforms) and len(list(one.registry)) == len(list(two.registry))


class StubDevice(types.ModuleType):
    """``torch.<type>`` of a device that is not here: memory, streams, events and generators are those of the CPU."""

    def __init__(self, chip: str, count: int = 2) -> None:
        super().__init__("stub")
        self.chip, self.count, self.calls = chip, count, list[str]()

    def is_available(self) -> bool:
        return self.count > 0

    def is_initialized(self) -> bool:
        return False

    def device_count(self) -> int:
        return self.count

    def set_device(self, index: int) -> None:
        self.calls.append(f"set_device({index})")

    def get_device_name(self, index: int) -> str:
        return self.chip

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return 9, 0

    def get_device_properties(self, index: int) -> Any:
        return types.SimpleNamespace(total_memory=64 << 30, gcnArchName="gfx942:sramecc+")

    def max_memory_allocated(self, index: int) -> int:
        return 123

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def Stream(self) -> Any:
        return CPU().stream()

    def stream(self, stream: Any) -> Any:
        return CPU().on_stream(stream)

    def Event(self, enable_timing: bool) -> Any:
        return CPU().event(enable_timing)

    def manual_seed_all(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)


# name: (chip as its driver says it, expected arch)
CHIPS = {
    "nvidia": ("NVIDIA H200", (9, 0)), "amd": ("AMD Instinct MI300X", (9, 4, 2)), "ascend": ("Ascend910B3", (910, 3)),
    "cambricon": ("MLU590-M9", (9, 0)), "mthreads": ("MTT S5000", (9, 0)), "enflame": ("GCU S60", (9, 0)),
    "sunrise": ("PT200", (9, 0)), "tsingmicro": ("TX81", (9, 0)), "intel": ("Intel Max 1550", (9, 0)),
    "gaudi": ("GAUDI3", (9, 0)), "metax": ("MetaX C500", (9, 0)), "iluvatar": ("Iluvatar BI-V150", (9, 0)),
    "hygon": ("K100_AI DCU", (9, 0)), "kunlunxin": ("KUNLUN P800", (9, 0)),
}  # fmt: skip


@pytest.fixture
def stub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Accelerator, StubDevice]:
    """A platform whose device module is a stub; builds of torch are as that vendor ships them."""
    accelerator = load_plugins().platforms[request.param]
    device = StubDevice(CHIPS[request.param][0])
    if hasattr(torch, accelerator.device_type):
        monkeypatch.setattr(torch, accelerator.device_type, device)
    else:
        monkeypatch.setattr(torch, accelerator.device_type, device, raising=False)
    if accelerator.adapter:
        for part in (accelerator.adapter.split(".")[0], accelerator.adapter):
            module = types.ModuleType(part)
            module.__spec__ = types.SimpleNamespace(name=part)  # type: ignore[assignment]
            module.__path__ = []
            monkeypatch.setitem(sys.modules, part, module)
    hip = request.param in ("amd", "hygon")
    monkeypatch.setattr(torch.version, "hip", "6.3" if hip else None)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    return accelerator, device


@pytest.mark.parametrize("stub", sorted(CHIPS), indirect=True)
def test_platforms_against_a_stub_device(stub: tuple[Accelerator, StubDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, device = stub
    assert accelerator.available() and not accelerator.tested
    assert (accelerator.device_count(), accelerator.total_memory(), accelerator.peak_memory()) == (2, 64 << 30, 123)
    assert accelerator.arch() == CHIPS[accelerator.name][1] and accelerator.chip() == CHIPS[accelerator.name][0]
    monkeypatch.setattr(accelerator, "device", lambda index=0: torch.device("cpu"))  # tensors need a real one
    assert [f for f in check_platform(accelerator) if f.status == FAIL] == []
    assert "synchronize" in device.calls


@pytest.mark.parametrize("stub", ["nvidia", "amd"], indirect=True)
def test_graphs_of_torch_cuda(stub: tuple[Accelerator, StubDevice]) -> None:
    """Every capture is on a stream of its own, in the memory of the first one, and ends whatever happens in it."""
    accelerator, device = stub
    calls = device.calls

    class CUDAGraph:
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            calls.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self) -> None:
            calls.append("end")

        def pool(self) -> tuple[int, int]:
            return 0, 7

    class Stream:
        def wait_stream(self, other: Any) -> None:
            calls.append("here waits" if self is here else "wait")

    here = Stream()
    assert accelerator.no_graphs(), "a build without them"
    device.CUDAGraph, device.Stream, device.current_stream = CUDAGraph, Stream, lambda: here  # type: ignore[attr-defined,method-assign]
    assert not accelerator.no_graphs()
    pool = GraphPool(accelerator)
    graph, result = pool.capture(lambda: 3)
    assert isinstance(graph, CUDAGraph) and result == 3
    with pytest.raises(ZeroDivisionError):
        pool.capture(lambda: 1 / 0)
    ours = [call for call in calls if not call.startswith("set_device")]
    again = ["end", "here waits", "wait"]
    assert ours == ["wait", "begin None thread_local", *again, "begin (0, 7) thread_local", "end", "here waits"]


@pytest.mark.parametrize("stub", ["ascend", "cambricon"], indirect=True)
def test_devices_without_graphs_for_training_say_so(stub: tuple[Accelerator, StubDevice]) -> None:
    assert stub[0].no_graphs() and CPU().no_graphs()


@pytest.mark.parametrize("stub", ["nvidia"], indirect=True)
def test_a_new_thread_waits_for_its_ranks_device(stub: tuple[Accelerator, StubDevice]) -> None:
    """Checkpoints are copied by a thread, whose current device is the first one."""
    accelerator, device = stub
    Platform(torch.device("cuda", 1), "nccl", accelerator).synchronize()
    assert device.calls[-2:] == ["set_device(1)", "synchronize"]


@pytest.mark.parametrize("stub", ["nvidia", "metax", "iluvatar", "kunlunxin", "amd", "hygon"], indirect=True)
def test_vendors_that_share_a_torch_name_are_told_apart(stub: tuple[Accelerator, StubDevice]) -> None:
    here = [a.name for a in load_plugins().platforms.values() if a.device_type == "cuda" and a.available()]
    assert here == [stub[0].name]


@pytest.mark.parametrize("stub", ["ascend"], indirect=True)
def test_choosing_a_platform(stub: tuple[Accelerator, StubDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    known = load_plugins().platforms.values()
    with monkeypatch.context() as patch:
        patch.setattr(type(stub[0]), "device", lambda self, index=0: torch.device("cpu", index))
        chosen = choose_platform(known, None, None, 1)
        assert chosen.name == "ascend" and chosen.device.index == 1
    assert choose_platform(known, "cpu", None, 0) == Platform(torch.device("cpu"), "gloo", chosen_cpu(known))
    assert choose_platform(known, None, "gloo", 0).name == "cpu"
    for name, backend, says in (
        ("ascnd", None, "no such platform (did you mean ascend?)"), ("mthreads", None, "torch_musa is not installed"),
        ("ascend", "nccl", "ascend does not speak it"), ("cpu", "mpi", "cpu does not speak it"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=re.escape(says)):
            choose_platform(known, name, backend, 0)
    with pytest.raises(UserError, match="this machine has 2 ascend devices"):
        stub[0].device(2)


def chosen_cpu(known: Any) -> Accelerator:
    return next(a for a in known if a.name == "cpu")


def test_two_vendors_in_one_process_must_be_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_plugins().platforms
    for name in ("ascend", "cambricon"):
        monkeypatch.setattr(type(found[name]), "available", lambda self: True)
    with pytest.raises(UserError, match="this machine has several platforms. Accepted: ascend or cambricon"):
        choose_platform(found.values(), None, None, 0)


def test_a_platform_that_is_not_automatic_is_taken_only_by_name() -> None:
    class Unasked(CPU):
        name, device_type, automatic = "unasked", "meta", False

        def failure(self) -> str:
            return "it was asked without need"

    known = [CPU(), Unasked()]
    assert choose_platform(known, None, None, 0).name == "cpu"
    with pytest.raises(UserError, match="it was asked without need"):
        choose_platform(known, "unasked", None, 0)


@pytest.mark.parametrize("stub", ["ascend"], indirect=True)
def test_an_adapter_that_raises_is_named_and_stops_nobody(
    stub: tuple[Accelerator, StubDevice], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> bool:
        raise RuntimeError("driver 7 is older than 8\nand so on")

    monkeypatch.setattr(stub[1], "is_available", broken)
    says = "torch_npu raised RuntimeError: driver 7 is older than 8"
    known = load_plugins().platforms
    with pytest.warns(RuntimeWarning, match=f"platform ascend cannot be used: {says}"):
        assert choose_platform(known.values(), None, None, 0).name == "cpu"
    with pytest.raises(UserError, match=says):
        choose_platform(known.values(), "ascend", None, 0)
    assert main(["plugins", "list"]) == 0 and says in capsys.readouterr().out


@pytest.mark.parametrize("stub", ["metax"], indirect=True)
def test_triton_kernels_keep_to_the_limits_of_the_platform(
    stub: tuple[Accelerator, StubDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reports more programs, warps and memory than the platform states."""
    import hetero_kernels as hk
    from hetero_plugins import triton_package

    reported = hk.Limits(arch="cuda-80", processors=40, max_grid=2**31 - 1, max_warps=32, shared_bytes=1 << 20)
    monkeypatch.setattr(triton_package, "INTERPRETED", False)
    monkeypatch.setattr(hk, "limits_of", lambda device: reported)
    triton_package.kernels.cache_clear()
    try:
        used = triton_package.kernels().rms_norm_fwd.keywords["limits"]
        assert triton_package.kernels().document_bounds is hk.document_bounds, "takes no limits"
    finally:
        triton_package.kernels.cache_clear()
    assert (used.max_grid, used.max_warps, used.shared_bytes) == (65_535, 16, 64 * 1024)
    assert (used.arch, used.processors) == ("cuda-80", 40)


def test_the_cpu_platforms_pass_their_own_check() -> None:
    for name in ("cpu", "reference"):
        assert [f for f in check_platform(load_plugins().platforms[name]) if f.status != "pass"] == []


def test_list_marks_what_was_never_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list"]) == 0
    shown = capsys.readouterr().out
    for line in shown.partition("plugin ")[0].splitlines():
        if line.startswith(("ascend ", "nvidia ", "metax ")):
            assert "UNTESTED" in line
    assert main(["plugins", "list", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {p["name"] for p in data["platforms"]} >= {"cpu", "reference", *CHIPS}
    assert all(p["tested"] == (p["name"] in ("cpu", "reference")) for p in data["platforms"])
    assert {k["provider"] for k in data["kernels"]} >= {"aten", "reference", "triton"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check", "acmee"], "no such plugin"), (["check", "aten", "--dtypes", "fp12"], "no such dtype (did you mean"),
        pytest.param(["check", "aten", "--operators", "sofmax"], "no such operator (did you mean softmax?)",
                     marks=pytest.mark.slow),  # like the next, from a process that imports the plugins
        pytest.param(["check", "aten", "--platform", "ascend"], "torch_npu is not installed", marks=pytest.mark.slow),
        (["chekc"], "invalid choice"),
        (["new", "Acme-1"], "no package name"), ([], "required"),
    ],
)  # fmt: skip
def test_wrong_words_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", *words]) == 2
    assert says in capsys.readouterr().err


def test_the_rates_of_a_fast_chip_come_from_calls_that_take_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    for each, largest, want in ((1e-6, 4096, [512, 1024]), (1e-9, 2048, [512, 1024, 2048]), (1.0, 2048, [512])):
        sizes.clear()
        monkeypatch.setattr(speed, "best_seconds", lambda call, _, each=each: each * call())

        def make(n: int) -> Callable[[], int]:
            sizes.append(n)
            return lambda: n

        assert speed._large_enough(make, 512, largest, lambda: None) == (want[-1], each * want[-1]) and sizes == want


def test_many_calls_wait_for_the_device_once_and_planner_rows_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, waits = [], []
    seconds = speed.best_seconds(lambda: calls.append(1), lambda: waits.append(1), 0.01)
    assert seconds > 0 and len(calls) > 20 * len(waits)
    registry = load_plugins().registry
    attention, cpu = registry.spec("attention"), torch.device("cpu")
    taken = iter([2e-4, 3e-3] * 3 + [2e-4, 3e-3, 6e-3] * 3)  # the first size is too short each time
    monkeypatch.setattr(speed, "best_seconds", lambda call, _: call() and next(taken))
    rows = speed.gemm_rows(registry.kernel("gemm", "aten"), cpu, torch.float32, lambda: None)
    assert rows == [[*(2 * n for n in shape), 3e-3] for shape in speed.GEMM_SHAPES]
    rows = speed.attention_rows(attention, registry.kernel("attention", "aten"), cpu, torch.float32, lambda: None)
    assert rows == [[2 * length, 8, 64, 3e-3, 6e-3] for length in speed.LENGTHS]


@pytest.mark.slow
def test_check_prints_one_json_object_and_writes_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "rates.json"
    words = ["plugins", "check", "aten", "--operators", "gemm", "--dtypes", "fp32", "--quick", "--json"]
    assert main([*words, "--profile", str(profile), "--chip", "A100"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and {f["kernel"] for f in report["findings"]} == {"gemm:aten"}
    rates = json.loads(profile.read_text())["rates"]["chips"]["A100"]["fp32"]
    assert len(rates["gemm"]) == 3 and all(row[3] > 0 for row in rates["gemm"])
    measured = json.dumps({"chips": {"A100-80-SXM": {"fp32": rates}}})
    text = "nodes: [{name: n, count: 1, chip: A100-80-SXM, chips_per_node: 1}]\n"
    text += "links: {intra_node: {bandwidth: 1 GB/s, latency: 1 us}}\n" + f"rates: {measured}\n"
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(text)
    read = load_rates(load_cluster(cluster), "fp32").chips["A100-80-SXM"]
    assert read.bytes_per_second == rates["bytes_per_second"], "the planner reads what the kit writes"


def test_a_new_plugin_is_written_once(tmp_path: Path) -> None:
    assert main(["plugins", "new", "acme", "--directory", str(tmp_path)]) == 0
    assert main(["plugins", "new", "acme", "--directory", str(tmp_path)]) == 2


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("stub", ["nvidia"], indirect=True)
def test_libraries_are_configured_before_the_device_is_first_used(
    stub: tuple[Accelerator, StubDevice], deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user set stays, and what holds is said."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that what is set meanwhile is taken back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    seen: list[str | None] = []

    def device(self: Accelerator, index: int = 0) -> torch.device:
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return torch.device("cpu", index)

    monkeypatch.setattr(type(stub[0]), "device", device)
    known = load_plugins().platforms.values()
    chosen = choose_platform(known, "nvidia", None, 0, deterministic=deterministic)
    assert seen == [":4096:8" if deterministic else None]
    kept = ("PYTORCH_ALLOC_CONF=max_split_size_mb:64",)
    assert chosen.settings == ((*kept, "CUBLAS_WORKSPACE_CONFIG=:4096:8") if deterministic else kept)


@pytest.mark.parametrize("stub", ["nvidia"], indirect=True)
def test_the_allocators_setting_applies_though_vendors_were_told_apart_before(
    stub: tuple[Accelerator, StubDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.cuda reads the variable when it is initialised, which asking for a chip's name does."""
    applied: list[str | None] = []
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)

    def name(index: int) -> str:
        if not applied:
            applied.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        return CHIPS["nvidia"][0]

    stub[1].get_device_name = name  # type: ignore[method-assign]
    stub[1].is_initialized = lambda: bool(applied)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", applied.append)
    monkeypatch.setattr(type(stub[0]), "device", lambda self, index=0: torch.device("cpu", index))
    choose_platform(load_plugins().platforms.values(), None, None, 0)
    assert applied[-1] == "expandable_segments:True"


@pytest.mark.parametrize("stub", ["nvidia", "amd"], indirect=True)
def test_the_only_visible_device_has_index_0(
    stub: tuple[Accelerator, StubDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``srun --gpus-per-task=1`` shows every process its own device. Without that, one device is one rank's."""
    accelerator, device = stub
    device.count = 1
    for variable in accelerator.visible:
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UserError, match="this machine has 1"):
        accelerator.device(3)
    monkeypatch.setenv(accelerator.visible[0], "5")
    assert accelerator.device(3).index == 0 and device.calls == ["set_device(0)"]


@pytest.mark.parametrize("chip", ["AMD Instinct MI300X", "Radeon RX 7900 XTX", "Instinct MI250"])
@pytest.mark.parametrize("stub", ["amd"], indirect=True)
def test_a_chip_without_its_vendors_name_is_known(stub: tuple[Accelerator, StubDevice], chip: str) -> None:
    stub[1].chip = chip
    assert [a.name for a in load_plugins().platforms.values() if a.device_type == "cuda" and a.available()] == ["amd"]
