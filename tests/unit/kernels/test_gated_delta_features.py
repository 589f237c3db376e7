"""The Triton kernels of the gated delta rule where every feature of a key decays by itself (Kimi Delta Attention),
against the rule token by token, in fp64."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

import hetero_kernels as hk
from hetero_megatron.ops import SPECS, Signature
from hetero_megatron.ops.conformance.run import wrong_kernels
from hetero_megatron.ops.gated_delta import CHANNELS
from hetero_megatron.ops.kernel_plan import resolve
from hetero_megatron.platform.plugins import load_plugins
from hetero_plugins import triton_package
from tests.support.kernel_cases import BF16, FP16, FP32, FP64, inputs_fenced, randn
from tests.unit.kernels import test_gated_delta as by_head
from tests.unit.kernels.test_gated_delta import judge, rounded_to, small_tiles

Tensors = list[torch.Tensor]


def arguments(
    b: int, s: int, key_heads: int, group: int, dk: int, dv: int, dtype: torch.dtype, strong: float = 1.0
) -> Tensors:  # fmt: skip
    """Decays per feature, a view with another head between rows; some as strong as exp(-``strong`` x^2)."""
    found = by_head.arguments(b, s, key_heads, group, dk, dv, dtype)
    g = -randn(b, s, key_heads * group + 1, dk, dtype=FP64, seed=4).square() * strong
    found[3] = inputs_fenced(g.to(torch.promote_types(dtype, FP32)))[:, :, 1:]
    return found


def test_chunks_tiles_documents_and_shared_key_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that end in a chunk and at its border, and that one token has; a last chunk that is not full."""
    judge(small_tiles(tmp_path, 3), arguments(1, 5, 1, 2, 3, 3, FP64), [[0, 2, 3, 4]], 1e-12, monkeypatch)


def test_a_state_goes_through_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(small_tiles(tmp_path, 100), arguments(2, 5, 1, 1, 5, 2, FP32), None, 2e-6, monkeypatch)


def test_strong_decays_leave_weak_ones_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors exp(G_i) and exp(-G_j) would be 0 and infinite."""
    judge(None, arguments(1, 70, 1, 1, 6, 4, FP32, strong=80.0), [[0, 63, 64]], 2e-6, monkeypatch)


def test_without_a_first_state_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    judge(None, arguments(1, 7, 2, 1, 3, 4, BF16), [[0, 4]], 1.5e-2, monkeypatch, with_state=False)


@pytest.fixture
def operands(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[set[str]]:
    """Those of products rounded to so many bits of mantissa, but for (1 + M)^-1; the precisions that were asked for."""
    plain, asked = interpreter.InterpreterBuilder.create_dot, set[str]()

    def create_dot(self: Any, a: Any, b: Any, total: Any, precision: Any, most: int) -> Any:
        asked.add(str(precision).rpartition(".")[2].lower())
        if "x3" not in str(precision).lower():
            a, b = (interpreter.TensorHandle(rounded_to(x.data, request.param), x.dtype.scalar) for x in (a, b))
        return plain(self, a, b, total, precision, most)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    yield asked


@pytest.mark.skipif(not hk.INTERPRETED, reason="a GPU rounds by itself")
@pytest.mark.parametrize(
    ("operands", "dtype", "bound"), [(7, BF16, 1.5e-2), (10, FP16, 2e-3)], indirect=["operands"], ids=str
)
def test_operands_with_as_few_bits_as_a_gpu_gives_them(
    operands: set[str], dtype: torch.dtype, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16, and TF32 where fp16 came in; but those of (1 + M)^-1."""
    table = tmp_path / "table.json"
    chosen = {"chunk": 32, "block_f": 16, "tf32": 1, "num_warps": 4, "num_stages": 1}
    table.write_text(json.dumps({"ops": {"delta_feature_pairs": [{"max_size": None, "config": chosen}]}}))
    found = arguments(1, 70, 1, 1, 16, 8, dtype, strong=0.05)
    judge(hk.Limits("interpreter", processors=2, table=str(table)), found, None, bound, monkeypatch)
    assert operands == {"tf32x3", "ieee" if dtype == BF16 else "tf32"}


def test_an_empty_share_has_its_state() -> None:
    found = arguments(1, 0, 1, 1, 3, 2, FP32)
    out, last = hk.gated_delta_fwd(*found)
    gradients = hk.gated_delta_bwd(out, last + 1, *found)
    assert not out.numel() and torch.equal(last, found[5]) and torch.equal(gradients[5], last + 1)
    assert [x.shape for x in gradients] == [x.shape for x in found]


def test_decays_of_another_number_of_features_are_refused() -> None:
    found = arguments(1, 2, 1, 1, 3, 2, FP32)
    with pytest.raises(AssertionError, match=r"g \[1, 2, 1, 2\]: expected \[1, 2, 1\] or \[1, 2, 1, 3\]"):
        hk.gated_delta_fwd(*found[:3], found[3][..., :2], *found[4:])


def test_who_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_package, "INTERPRETED", False)
    for device, provider in (("cuda", "triton"), ("cpu", "aten"), ("npu", "aten")):
        dims = {"key_dim": (128,), "value_dim": (128, 256)}
        signature = Signature("gated_delta_rule", device, BF16, device, dims=dims, features=(CHANNELS,))
        assert resolve(load_plugins().registry, [signature]).provider("gated_delta_rule") == provider


def test_one_decay_for_all_features_in_its_place_is_found() -> None:
    """A kernel that takes the wrong form."""
    kernel, spec = load_plugins().registry.kernel("gated_delta_rule", "triton"), SPECS["gated_delta_rule"]

    def by_whole_states(*args: Any) -> tuple[torch.Tensor, ...]:
        g = args[3]
        return kernel.forward(*args[:3], g.mean(-1) if g.dim() == 4 else g, *args[4:])  # type: ignore[return-value]

    signature = Signature("gated_delta_rule", "cpu", FP32, "cpu", features=(CHANNELS,))
    for forward in (kernel.forward, by_whole_states):
        found = wrong_kernels([(spec, replace(kernel, forward=forward), signature)], torch.device("cpu"), lambda: None)
        assert bool(found) == (forward is by_whole_states), found
