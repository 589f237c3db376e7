"""The Triton kernels of the state-space rule of Mamba-2 against the rule token by token, in fp64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hetero_kernels as hk
from hetero_megatron.errors import UserError
from hetero_megatron.ops import SPECS, Signature
from hetero_megatron.ops.conformance.run import wrong_kernels
from hetero_megatron.ops.kernel_plan import resolve
from hetero_megatron.platform.plugins import load_plugins
from hetero_plugins import triton_package
from tests.support.kernel_cases import BF16, FP16, FP32, FP64, inputs_fenced, randn
from tests.unit.kernels.test_gated_delta import judge_rule, small_tiles

Tensors = list[torch.Tensor]


def arguments(b: int, s: int, groups: int, each: int, dk: int, dv: int, dtype: torch.dtype) -> Tensors:
    """q, k, v, g, write, state; the first three are views, with other heads between their rows."""
    q, k = (inputs_fenced(randn(b, s, groups + 1, dk, dtype=dtype, seed=i))[:, :, :groups] for i in (1, 2))
    v = inputs_fenced(randn(b, s, groups * each + 2, dv, dtype=dtype, seed=3))[:, :, 1:-1]
    wide = torch.promote_types(dtype, FP32)
    g = -randn(b, s, groups * each, dtype=FP64, seed=4).square().to(wide)
    write = randn(b, s, groups * each, dtype=FP64, seed=5).exp().to(wide)
    return [q, k, v, g, write, randn(b, groups * each, dk, dv, dtype=wide, seed=6)]


def judge(limits: hk.Limits | None, found: Tensors, documents: list[list[int]] | None, bound: float,
          monkeypatch: pytest.MonkeyPatch, with_state: bool = True) -> None:  # fmt: skip
    """Of the state-space rule."""
    rules = hk.state_space_fwd, hk.state_space_bwd, hk.state_space_reference
    judge_rule(*rules, "write", limits, found, documents, bound, monkeypatch, with_state)


def test_chunks_tiles_documents_and_shared_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that end in a chunk, at its border, and that one token has; a last chunk that is not full."""
    judge(small_tiles(tmp_path, 3), arguments(1, 6, 1, 2, 3, 3, FP64), [[0, 2, 3]], 1e-12, monkeypatch)


def test_a_state_goes_through_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(small_tiles(tmp_path, 100), arguments(2, 5, 2, 1, 3, 2, FP32), None, 5e-6, monkeypatch)


@pytest.mark.parametrize(("dtype", "bound"), [(BF16, 1.5e-2), (FP16, 2e-3)], ids=str)
def test_without_a_first_state_in_16_bits(dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(None, arguments(1, 7, 2, 1, 3, 4, dtype), [[0, 4]], bound, monkeypatch, with_state=False)


def test_tokens_that_forget_all_leave_those_after_them_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32; differences of plain sums would be off by 1e-3 here. Below what exponentials have, nothing is left."""
    found = arguments(1, 70, 1, 2, 4, 3, FP32)
    found[3] = -torch.where(found[3] < -0.5, found[3].abs() * 900.0, found[3].abs() * 0.1)
    found[3][0, 40] = -torch.inf
    judge(None, [*found[:3], found[3].clamp(min=-1e30), *found[4:]], None, 5e-6, monkeypatch)
    out, _ = hk.state_space_fwd(*found)
    assert bool(out.isfinite().all())


def test_nan_in_a_decay_is_not_lost() -> None:
    found = arguments(1, 5, 1, 1, 3, 2, FP32)
    found[3][0, 2] = torch.nan
    out, last = hk.state_space_fwd(*found)
    assert bool(out[0, 2:].isnan().all()) and bool(last.isnan().all())


def test_an_empty_share_has_its_state() -> None:
    found = arguments(1, 0, 1, 1, 3, 2, FP32)
    out, last = hk.state_space_fwd(*found)
    gradients = hk.state_space_bwd(out, last + 1, *found)
    assert not out.numel() and torch.equal(last, found[5]) and torch.equal(gradients[5], last + 1)
    assert [x.shape for x in gradients] == [x.shape for x in found]


def test_who_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU does unasked; not states of more than fit a program's registers, and not the CPU."""
    registry, dims = load_plugins().registry, {"key_dim": (128,), "value_dim": (64,)}
    monkeypatch.setattr(triton_package, "INTERPRETED", False)

    def serves(device: str, **more: tuple[int, ...]) -> str:
        signature = Signature("state_space_rule", device, BF16, device, dims=dims | more)
        return resolve(registry, [signature]).provider("state_space_rule")

    assert serves("cuda") == "triton" and serves("cpu") == "aten" and serves("npu") == "aten"
    assert serves("cuda", key_dim=(256,)) == "aten"
    with pytest.raises(UserError, match="key_dim 256 is over 128"):
        signature = Signature("state_space_rule", "cuda", BF16, "cuda", dims={"key_dim": (256,)})
        resolve(registry, [signature], {"state_space_rule": "triton"})


def test_the_delta_rules_correction_in_its_place_is_found() -> None:
    """A kernel that was compiled with the wrong option."""
    registry = load_plugins().registry
    kernel, other = registry.kernel("state_space_rule", "triton"), registry.kernel("gated_delta_rule", "triton")

    def with_correction(*args: object) -> tuple[torch.Tensor, ...]:
        return other.forward(*args, 1e-6)  # type: ignore[return-value]

    signature = Signature("state_space_rule", "cpu", FP32, "cpu")
    for forward in (kernel.forward, with_correction):
        used = [(SPECS["state_space_rule"], replace(kernel, forward=forward), signature)]
        found = wrong_kernels(used, torch.device("cpu"), lambda: None)
        assert bool(found) == (forward is with_correction), found
