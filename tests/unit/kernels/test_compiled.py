"""What the compiler makes of the kernels, against the recorded table: no device is needed, and none must get worse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_kernels.attention import shared_bytes
from tests.support.paths import ROOT

FOLDER = ROOT / "benchmarks" / "gpu"
TABLE = FOLDER / "compiled" / "cuda-90.json"
ON_CHIP = 227 * 1024
PARTS = 2  # of all calls, where kernels changed minutes of compiling, so that several processes share them
ROWS: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())["kernels"]


def check(*words: str) -> None:
    command = [sys.executable, str(FOLDER / "compile_kernels.py"), "--check", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_kernel_has_one_key_whatever_is_launched_before() -> None:
    """Else what one process has compiled, another would not find."""
    program = """
import sys
from triton.runtime.jit import JITFunction
import hetero_kernels
modules = [vars(module) for name, module in sys.modules.items() if name.startswith("hetero_kernels.")]
kernels = [value for values in modules for value in values.values() if isinstance(value, JITFunction)]
for kernel in sorted(kernels, key=lambda kernel: kernel.fn.__name__, reverse=sys.argv[1] == "back"):
    print(kernel.fn.__module__, kernel.fn.__name__, kernel.cache_key)
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    keys = [
        sorted(subprocess.run([sys.executable, "-c", program, way], capture_output=True, text=True, check=True,
                              env=environment).stdout.splitlines())
        for way in ("on", "back")
    ]  # fmt: skip
    assert keys[0] == keys[1] and len(keys[0]) > 50


@pytest.mark.slow
def test_some_kernels_are_no_worse_than_recorded() -> None:
    check("--only", "adamw, bf16 copies", "gelu_fwd 14336, tanh", "rms_norm_fwd 4096", "cross_entropy_bwd 131072")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_kernel_is_worse_than_recorded(part: int) -> None:
    """Minutes of compiling, where the kernels are not those that the table was recorded from."""
    check("--changed", "--only", *sorted({key.rpartition(": ")[0] for key in ROWS})[part::PARTS])


def test_every_call_is_recorded_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import compile_cases

    names = [name for group in compile_cases.CASES for name, _ in group()]
    assert len(set(names)) == len(names) and set(names) == {key.rpartition(": ")[0] for key in ROWS}


def test_only_what_changed_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every version of Triton has a table of its own."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the module takes away
    import compile_kernels

    compiled = list[str]()
    monkeypatch.setattr(compile_kernels.triton, "compile", lambda source, **rest: compiled.append(source.name))
    monkeypatch.setattr(compile_kernels.Compiler, "resources", lambda self, made, warps: {"registers": 1})
    monkeypatch.setattr(compile_kernels.triton.compiler, "ASTSource", _Source)
    kernel, name = SimpleNamespace(params=(), fn=SimpleNamespace(__name__="_kernel")), "a call: kernel"
    for changes, count in (({}, 0), ({"source": "1"}, 1), ({"num_warps": 8}, 1)):
        row = {"num_warps": 4, "source": "0" * 16, "registers": 7, **changes}
        compiler = compile_kernels.Compiler(90, {name: row})
        compiler.case = "a call"
        compiled.clear()
        compiler(kernel, grid=(1,), num_warps=4)
        assert len(compiled) == count and compiler.rows[name]["registers"] == (1 if count else 7)
    assert compile_kernels.table_path(90) == TABLE
    monkeypatch.setattr(compile_kernels.triton, "__version__", "3.6.0")
    assert compile_kernels.table_path(90).name == "cuda-90-triton-3.6.0.json"
    assert compile_kernels.table_path(80).name == "cuda-80.json"


class _Source:
    def __init__(self, kernel: Any, *rest: Any) -> None:
        self.name = kernel.fn.__name__

    def hash(self) -> str:
        return "0" * 64


@pytest.mark.slow
def test_a_folder_of_compiled_kernels_has_what_triton_looks_for(tmp_path: Path) -> None:
    """Twice in processes of their own: the second one finds the first one's."""
    command = [sys.executable, str(FOLDER / "kernel_cache.py"), "--out", str(tmp_path), "--only", "first run: l2norm"]
    said = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    launched = [re.findall(r"(\d+) kernels, (\d+) of them new", text)[0] for text in said]
    assert launched[0][0] == launched[0][1] == launched[1][0] != "0" and launched[1][1] == "0"


def test_what_gets_worse_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the module takes away
    from compile_kernels import LESS, MORE, worse

    name, row = next(iter(ROWS.items()))
    assert worse({name: row}, ROWS) == []
    for key, change in [*((key, 1) for key in LESS), *((key, -1) for key in MORE)]:
        after = row[key] + change
        assert worse({name: {**row, key: after}}, ROWS) == [f"{name}: {key} {row[key]} -> {after}"]
        assert worse({name: {**row, key: row[key] - change}}, ROWS) == []
    assert worse({"new": row}, ROWS) == ["new: not recorded"]


ATTENTION = [
    (name, kernel, int(dim), mask)
    for key in ROWS
    if key.startswith(("attention_fwd", "attention_bwd")) and "fp32" not in key and "dropout" not in key
    for name, _, kernel in [key.rpartition(": ")]
    for dim, mask in [name.split(" ", 1)[1].split(", ")]
]  # fmt: skip


def test_attention_loads_ahead_fits_and_spills_next_to_nothing_in_its_loops() -> None:
    assert len(ATTENTION) == 4 * 4 * 3
    for name, kernel, dim, mask in ATTENTION:
        row, large = ROWS[f"{name}: {kernel}"], dim > 128
        assert row["shared_bytes"] <= ON_CHIP and row["wgmma"] > 0 and row["mma"] == 0
        assert large or row["async_wait"] > 0, name
        assert large or row["loop_spills"] <= (0 if mask in ("causal", "full") else 2), name


def test_grouped_products_spill_nothing_and_16_bit_ones_run_on_warp_groups() -> None:
    grouped = {name: row for name, row in ROWS.items() if name.startswith("grouped_gemm_")}
    assert {name.split()[0] for name in grouped} == {"grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw"}
    for name, row in grouped.items():
        assert row["loop_spills"] == row["spill_bytes"] == 0, name
        assert "fp32" in name or row["wgmma"] > 0, name


DELTA_SPILLS = {"delta_query_gradients": 250, "delta_key_gradients": 550}  # bytes, nearly all between inner loops


def test_the_gated_delta_rule_fits_and_spills_little_and_next_to_nothing_in_its_loops() -> None:
    rules = {name: row for name, row in ROWS.items() if name.startswith("gated_delta_") and "by feature" not in name}
    kernels = {name.rpartition(": ")[2] for name in rules}
    assert kernels == {"delta_pairs", "delta_states", "delta_state_gradients", *DELTA_SPILLS}
    for name, row in rules.items():
        in_fp16, in_fp32 = "fp16" in name, "fp32" in name  # both with operands of 4 bytes
        spills = DELTA_SPILLS.get(name.rpartition(": ")[2], 0)
        assert row["shared_bytes"] <= ON_CHIP and row["spill_bytes"] <= spills * (4 if in_fp16 else 1), name
        assert row["loop_spills"] <= (9 if in_fp16 else 7) * (spills > 0), name
        assert in_fp16 or in_fp32 or (row["wgmma"] > 0 and row["mma"] == 0), name


def test_decays_by_feature_and_state_spaces_fit_and_spill_little_in_16_bits() -> None:
    """Fewer than 40 reads and writes of spilled registers in a loop in bf16; in fp32 they are for checking."""
    rules = {name: row for name, row in ROWS.items() if name.startswith("state_space_") or "by feature" in name}
    features = {"delta_feature_pairs", "delta_feature_gradients", "delta_unit_gradients"}
    states = {"delta_pairs", "delta_states", "delta_state_gradients", *DELTA_SPILLS}
    assert {name.rpartition(": ")[2] for name in rules} == features | states
    for name, row in rules.items():
        if "fp32" not in name:
            assert row["spill_bytes"] <= (750 if "fp16" in name else 400), name
            assert row["loop_spills"] <= (150 if "fp16" in name else 40), name
        assert row["shared_bytes"] <= ON_CHIP, name


def test_frozen_weights_in_4_bits_are_made_without_spills_by_many_programs() -> None:
    made = {name: row for name, row in ROWS.items() if name.startswith("nf4_dequantize")}
    assert len(made) == 3 and all(not row["enable_fp_fusion"] for row in made.values())
    assert all(row["spill_bytes"] == 0 and row["blocks_per_sm"] >= 3 for row in made.values())


def test_the_memory_that_attention_is_cut_by_is_what_the_compiler_takes() -> None:
    blocks = json.loads((ROOT / "kernels" / "hetero_kernels" / "tables" / "cuda-90.json").read_text())["ops"]
    for name, kernel, dim, mask in ATTENTION:
        op = {"attention_forward": "attention_fwd"}.get(kernel, kernel.replace("backward", "bwd"))
        rules = (r for r in blocks[op] if "fp32" not in r.get("dtypes", ()) and dim <= (r["max_size"] or dim))
        chosen, padded = next(rules)["config"], 1 << (dim - 1).bit_length()
        sizes = (chosen["block_q"], chosen["block_k"], chosen["num_stages"])
        row = ROWS[f"{name}: {kernel}"]
        assert row["num_stages"] == chosen["num_stages"], "nothing had to be cut"
        assert shared_bytes(op, *sizes, padded, padded, 2, mask == "documents") == row["shared_bytes"], name


def test_the_update_leaves_room_for_other_programs() -> None:
    for key, row in ROWS.items():
        if key.startswith("adamw"):
            assert row["registers"] <= 40 and row["blocks_per_sm"] >= 6 and row["shared_bytes"] == 0

