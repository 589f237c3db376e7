"""The conformance kit: it passes what is right, and finds what is wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero_megatron.cli.scaffold import plugin_files
from hetero_megatron.ops import SPECS, Signature, torch_registry
from hetero_megatron.ops.conformance import DTYPES, FAIL, Finding, check_kernel, kernel_steps
from hetero_megatron.ops.conformance.checks import Step
from hetero_megatron.ops.conformance.compare import flatten, mismatch
from hetero_megatron.ops.conformance.run import Sandbox
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.plugin_check.check import check_plugin
from hetero_megatron.plugin_check.report import print_report
from hetero_plugins import onednn
from tests.support.paths import ROOT
from tests.support.selection import quick

CPU = torch.device("cpu")


def failures(provider: str, op: str, dtypes: tuple[torch.dtype, ...] = DTYPES, quick: bool = True) -> list[Finding]:
    registry = load_plugins().registry if provider in ("triton", "onednn") else torch_registry()
    kernel = registry.kernel(op, provider)
    found = list(check_kernel(SPECS[op], kernel, CPU, lambda d: Signature(op, "cpu", d, "cpu"), dtypes, quick))
    assert len(found) >= 10 * len(dtypes)
    return [f for f in found if f.status == FAIL]


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN serves CPUs with AVX-512")
@pytest.mark.parametrize("op", ["gemm", "grouped_gemm"])
def test_onednn_conforms(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "cpu_says", {"vendor_id": onednn.AMD, "cpu family": "26"}.__getitem__)
    assert failures("onednn", op, (torch.float32,), quick=False) == []


def test_onednn_serves_where_aten_does_not_use_avx_512(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On AMD's CPUs that compute 512 bits in halves it has the products of linear layers, and not those of experts."""
    registry = load_plugins().registry
    for vendor, family, said in ((onednn.AMD, "26", ("", "")), ("", "", ("", "")), (onednn.INTEL, "6", ("MKL", "MKL")),
                                 (onednn.AMD, "25", ("", "halves"))):  # fmt: skip
        info = tmp_path / "cpuinfo"
        words = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: a GenuineIntel one\n"
        info.write_text(words)
        assert onednn.cpu_says("vendor_id", info) == vendor and onednn.cpu_says("cpu family", info) == family
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
            patch.setattr(onednn, "cpu_says", {"vendor_id": vendor, "cpu family": family}.__getitem__)
            for op, word in zip(("gemm", "grouped_gemm"), said, strict=True):
                problems = registry.kernel(op, "onednn").supports(Signature(op, "cpu", torch.float32, "cpu"))
                assert (word in problems[0]) if word else problems == []
    assert onednn.cpu_says("vendor_id", tmp_path / "nothing") == ""


@pytest.mark.parametrize("op", sorted(SPECS))
def test_built_in_providers_conform(op: str) -> None:
    """In fp32."""
    if any(kernel.provider == "aten" for kernel in torch_registry().kernels(op)):
        assert failures("aten", op, (torch.float32,)) == []
    else:
        assert op.startswith("gemm_fp8")
    assert failures("reference", op, (torch.float32,)) == []


@pytest.mark.slow
def test_built_in_providers_conform_with_every_case() -> None:
    """More than 65,535 rows among them."""
    for op in sorted(SPECS):
        if any(kernel.provider == "aten" for kernel in torch_registry().kernels(op)):
            assert failures("aten", op, (torch.float32,), quick=False) == [], op


@pytest.mark.slow
@pytest.mark.parametrize(("provider", "dtype"), [("aten", torch.bfloat16), ("reference", torch.float16)], ids=str)
@pytest.mark.parametrize("op", sorted(SPECS))
def test_built_in_providers_conform_in_16_bits(op: str, provider: str, dtype: torch.dtype) -> None:
    if any(kernel.provider == provider for kernel in torch_registry().kernels(op)):
        assert failures(provider, op, (dtype,)) == []
    else:
        assert op.startswith("gemm_fp8")


def findings_of(step: Step) -> Iterator[Finding]:
    """Of more rows than a grid of 16 bits holds: up to the backward pass and what it wrote out of bounds. The checks
    that follow call the same kernels again, which every other case does in less time."""
    backward = False
    for finding in step.run():
        yield finding
        if backward and finding.check == "bounds" and step.case.startswith("many "):
            return
        backward = backward or finding.check == "backward"


TRITON = sorted(k.op for k in load_plugins().registry if k.provider == "triton")


@pytest.mark.parametrize("op", ["swiglu", "rope", "vocab_cross_entropy"])
def test_triton_under_its_interpreter_conforms(op: str) -> None:
    assert failures("triton", op, (torch.float32, torch.bfloat16)) == []


@pytest.mark.parametrize("op", quick(TRITON, [], set(TRITON) - {"attention", "gemm_fp8_blockwise"}))
def test_every_triton_kernel_conforms(op: str) -> None:
    """In fp32 with every case; of cases without many rows or chunks half in bf16, and a quarter in fp16: the
    interpreter is slow."""
    kernel = load_plugins().registry.kernel(op, "triton")
    steps = list(kernel_steps(SPECS[op], kernel, CPU, lambda d: Signature(op, "cpu", d, "cpu")))
    assert {step.dtype for step in steps} == {str(dtype).removeprefix("torch.") for dtype in DTYPES}
    kept = [step for step in steps if step.dtype == "float32"]
    for dtype, share, first in (("bfloat16", 2, 0), ("float16", 4, 1)):
        few = [step for step in steps if step.dtype == dtype and not step.case.startswith(("many ", "several "))]
        kept += [step for i, step in enumerate(few) if i // 2 % share == first]  # two by two: variants alternate
    found = [finding for step in kept for finding in findings_of(step)]
    assert len(found) >= 15
    assert [f for f in found if f.status == FAIL] == []


def test_every_operator_over_rows_has_a_case_of_more_than_a_grid_of_16_bits_holds() -> None:
    rows = {op for op in SPECS if op not in ("adamw", "l2norm", "attention", "gated_delta_rule", "state_space_rule")}
    large = {op for op in rows for case in SPECS[op].cases() if any(65_537 in x.shape for x in flatten(case.args))}
    assert large == rows


@pytest.fixture
def vendors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The two packages of plugins/ as plugins of this process, found by the environment list."""
    for name in ("example_vendor", "bad_vendor"):
        monkeypatch.syspath_prepend(str(ROOT / "plugins" / name))
    monkeypatch.setenv("HETERO_PLUGINS", "hetero_example_vendor.plugin,hetero_bad.plugin")
    yield
    for module in [m for m in sys.modules if m.startswith(("hetero_example_vendor", "hetero_bad"))]:
        del sys.modules[module]


@pytest.mark.slow
def test_the_example_is_what_the_scaffold_writes_and_passes(vendors: None, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ROOT / "plugins" / "example_vendor"
    written = {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.suffix in (".py", ".toml", ".md") and not str(path.relative_to(folder)).startswith(".")
    }
    assert written == plugin_files("example_vendor"), "hetero-megatron plugins new example_vendor writes other files"
    report = check_plugin("example_vendor", None, ["fp32", "bf16"], None, True, True)
    assert report.ok and report.platform == "example_vendor"
    assert {s["direction"] for s in report.speeds} == {"forward", "backward"}
    (rates,) = report.profile["rates"]["chips"].values()
    assert rates["bf16"]["bytes_per_second"] > 0
    print_report(report)
    shown = capsys.readouterr().out
    assert "all passed" in shown and "swap: reference backward" in shown and "of the floor" in shown


@pytest.mark.slow
def test_every_defect_of_the_bad_plugin_is_found(vendors: None, capsys: pytest.CaptureFixture[str]) -> None:
    import hetero_bad.plugin as bad

    report = check_plugin("bad", None, ["bf16"], None, True, False)
    assert not report.ok
    failed = [f for f in report.findings if f["status"] == FAIL]
    for kernel, (check, words) in bad.DEFECTS.items():
        found = [f["detail"] for f in failed if f["kernel"] == kernel and f["check"] == check]
        assert any(words in detail for detail in found), f"{kernel}: {check} with {words!r}: {found[:3]}"
    assert {f["kernel"] for f in failed} == set(bad.DEFECTS)
    only = {"gemm:sums_beyond_the_end": "bounds", "attention:half_a_delta": "tiles", "attention:rounded_share": "tiles"}
    for kernel, check in only.items():
        assert {f["check"] for f in failed if f["kernel"] == kernel} == {check}, "and nothing else is wrong with it"
    assert all("delta given" in f["case"] for f in failed if f["kernel"] == "attention:half_a_delta")
    print_report(report)
    assert f"{len(failed)} FAILED" in capsys.readouterr().out


def test_one_wrong_row_and_small_truths_do_not_hide_behind_tolerances() -> None:
    """Rows of a softmax are far below 1; an error of 3 % in the largest element of a bf16 tensor is no rounding."""
    row = torch.full((4, 1000), 1e-3, dtype=torch.float64)
    assert not mismatch(row.float(), row, row.float(), 1e-6, 2.0)
    assert "error" in mismatch((row * (1 + 2e-5)).float(), row, row.float(), 1e-6, 2.0)
    many = torch.ones(65_537, 4, dtype=torch.float64)
    off = many.clone()
    off[77] *= 1.03
    assert not mismatch(many.bfloat16(), many, many.bfloat16(), 5e-3, 2.0)
    assert "one element is off" in mismatch(off.bfloat16(), many, many.bfloat16(), 5e-3, 2.0)


@pytest.mark.slow
def test_a_plugin_whose_device_is_absent_was_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check_plugin("ascend", None, ["fp32"], None, True, False)
    print_report(report)
    shown = capsys.readouterr().out
    assert not report.ok and "none of its devices is here (ascend: torch_npu is not installed)" in shown
    monkeypatch.setenv("TRITON_INTERPRET", "")
    report = check_plugin("triton", None, ["fp32"], ["rope"], True, False)
    (finding,) = [f for f in report.findings if f["status"] == FAIL]
    assert not report.ok and finding["kernel"] == "rope:triton" and "set TRITON_INTERPRET=1" in finding["detail"]
    assert any("TRITON_INTERPRET is not set" in note for note in report.notes)


def test_a_providers_name_may_have_dots() -> None:
    kernel = replace(torch_registry().kernel("rope", "reference"), provider="acme-v2.1")
    asked = lambda d: Signature("rope", "cpu", d, "cpu")  # noqa: E731
    found = list(check_kernel(SPECS["rope"], kernel, CPU, asked, DTYPES[:1], True))
    assert "compile" in {f.check for f in found} and FAIL not in {f.status for f in found}


CHIP = """
import torch
from hetero_megatron.platform import Accelerator

HETERO_PLUGIN_API = 1


class Chip(Accelerator):
    name, vendor, device_type = "chip", "Acme", "privateuseone"

    def available(self): return True
    def device(self, index=0): return torch.device("cpu")
    def arch(self, index=0): return ()
    def chip(self, index=0): return "chip"
    def synchronize(self): pass


def register(api): api.platform(Chip())
"""


@pytest.mark.slow
def test_without_a_platform_the_accelerator_that_is_here_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hetero_chip.py").write_text(CHIP)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HETERO_PLUGINS", "hetero_chip")
    report = check_plugin("reference", None, ["fp32"], ["rope"], True, False)
    assert report.ok and report.platform == "chip"


def test_the_bad_plugin_is_named_and_harms_nobody(vendors: None) -> None:
    found = load_plugins()
    (broken,) = found.broken()
    assert broken.source.name == "bad" and "it has no backward" in broken.error
    assert "example_vendor" in found.platforms
    assert not {"twice", "no_backward", "base_two"} & set(found.registry.providers())


def test_red_zones_see_single_elements() -> None:
    for offset, says in ((-1, "1 before"), (10, "1 after")):
        box = Sandbox()
        with box:
            x = torch.empty(2, 5)
        x.as_strided((1,), (1,), x.storage_offset() + offset).fill_(1.0)
        assert x.isnan().all() and [says in d for d in box.damage()] == [True]
    box = Sandbox()
    x = box.place(torch.arange(6.0).view(2, 3).t())
    assert torch.equal(x, torch.arange(6.0).view(2, 3).t()) and x.stride() == (1, 3) and box.damage() == []
    x[0, 0] = 9
    assert "changed an argument" in box.damage()[0]


def test_the_environment_is_the_interpreters() -> None:
    """conftest sets it before Triton is imported; without it the Triton tests would test nothing."""
    if not torch.accelerator.is_available():
        assert os.environ.get("TRITON_INTERPRET") == "1"
