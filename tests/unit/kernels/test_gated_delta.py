"""The Triton kernels of the gated delta rule against the rule token by token, in fp64."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from triton.runtime import interpreter

import hetero_kernels as hk
from hetero_megatron.errors import UserError
from hetero_megatron.ops import SPECS, Signature
from hetero_megatron.ops.kernel_plan import resolve
from hetero_megatron.platform.plugins import load_plugins
from hetero_plugins import triton_package
from tests.support.kernel_cases import BF16, DEVICE, FP16, FP32, FP64, fenced_memory, inputs_fenced, randn

EPS = 0.3
SMALL = {
    "delta_pairs": {"chunk": 4, "num_warps": 4, "num_stages": 1},
    "delta_feature_pairs": {"chunk": 4, "block_f": 2, "num_warps": 4, "num_stages": 1},
    "delta_feature_gradients": {"block_f": 2, "block_v": 2, "num_warps": 4, "num_stages": 1},
    "delta_unit_gradients": {"num_warps": 4, "num_stages": 1},
    **{f"delta_{name}": {"block_v": 2, "num_warps": 4, "num_stages": 1}
       for name in ("states", "state_gradients", "query_gradients", "key_gradients")},
}  # fmt: skip
Tensors = list[torch.Tensor]
Rule = Callable[..., Any]


def small_tiles(tmp_path: Path, max_grid: int) -> hk.Limits:
    """Chunks of 4 tokens and tiles of 2 features of values; on a GPU, of 16 each."""
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"ops": {op: [{"max_size": None, "config": found}] for op, found in SMALL.items()}}))
    return hk.Limits("interpreter", processors=2, max_grid=max_grid, table=str(table))


def arguments(b: int, s: int, key_heads: int, group: int, dk: int, dv: int, dtype: torch.dtype) -> Tensors:
    """q, k, v, g, beta, state; the first three are views, with other heads between their rows."""
    q, k = (inputs_fenced(randn(b, s, key_heads + 1, dk, dtype=dtype, seed=i))[:, :, :key_heads] for i in (1, 2))
    v = inputs_fenced(randn(b, s, key_heads * group + 2, dv, dtype=dtype, seed=3))[:, :, 1:-1]
    wide = torch.promote_types(dtype, FP32)
    g = -randn(b, s, key_heads * group, dtype=FP64, seed=4).square().to(wide)
    beta = randn(b, s, key_heads * group, dtype=FP64, seed=5).sigmoid().to(dtype)
    return [q, k, v, g, beta, randn(b, key_heads * group, dk, dv, dtype=wide, seed=6)]


def judge(limits: hk.Limits | None, found: Tensors, documents: list[list[int]] | None, bound: float,
          monkeypatch: pytest.MonkeyPatch, with_state: bool = True) -> None:  # fmt: skip
    """Of the gated delta rule."""
    kernels = (partial(f, eps=EPS) for f in (hk.gated_delta_fwd, hk.gated_delta_bwd, hk.gated_delta_reference))
    judge_rule(*kernels, "beta", limits, found, documents, bound, monkeypatch, with_state)


def judge_rule(
    forward: Rule, backward: Rule, reference: Rule, write: str, limits: hk.Limits | None, found: Tensors,
    documents: list[list[int]] | None, bound: float, monkeypatch: pytest.MonkeyPatch, with_state: bool,
) -> None:  # fmt: skip
    """Results and gradients, in memory that is full of NaN and fenced; ``write``: what the fifth argument is called."""
    dtype, (b, s, heads, dv) = found[2].dtype, found[2].shape
    numbers = None if documents is None else hk.document_numbers(documents, s, DEVICE)
    dout = randn(b, s, heads, dv, dtype=dtype, seed=7)
    dlast = randn(b, heads, found[0].shape[3], dv, dtype=found[5].dtype, seed=8)
    given = found if with_state else [*found[:5], None]
    with fenced_memory(monkeypatch):
        results = forward(*given, documents=numbers, limits=limits)
        gradients = backward(dout, dlast, *given, documents=numbers, limits=limits)
    leaves = [x.double().requires_grad_() for x in found[: 5 + with_state]]
    wanted = reference(*leaves, documents=numbers)
    torch.autograd.backward(wanted, [dout.double(), dlast.double()])
    assert with_state or gradients[5] is None
    pairs = [*zip(results, wanted, strict=True), *zip(gradients, [x.grad for x in leaves], strict=False)]
    for name, (got, want) in zip(("out", "last", "q", "k", "v", "g", write, "state"), pairs, strict=False):
        assert got.shape == want.shape and got.is_contiguous()
        assert float((got.double() - want.detach()).norm()) <= bound * float(want.detach().norm()), name
    assert [x.dtype for x in gradients if x is not None] == [x.dtype for x in found[: 5 + with_state]]
    assert results[0].dtype == dtype and results[1].dtype == found[3].dtype


def test_chunks_tiles_documents_and_shared_key_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that end in a chunk, at its border, and that one token has; a last chunk that is not full."""
    found = arguments(1, 10, 1, 2, 5, 3, FP64)
    judge(small_tiles(tmp_path, 3), found, [[0, 2, 3, 8]], 1e-12, monkeypatch)


def test_a_state_goes_through_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(small_tiles(tmp_path, 100), arguments(2, 5, 1, 1, 3, 2, FP64), None, 1e-12, monkeypatch)


def test_without_a_first_state_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    judge(None, arguments(1, 7, 2, 1, 3, 4, BF16), [[0, 4]], 1.5e-2, monkeypatch, with_state=False)


def test_alike_keys_that_do_not_decay_cancel_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """M is 1 all over below the diagonal: its powers are as large as 10^18."""
    found = arguments(1, 64, 1, 1, 4, 2, FP32)
    found[1], found[3], found[4] = found[1][:, :1].expand(-1, 64, -1, -1), 0 * found[3], 0 * found[4] + 1
    judge(None, found, None, 1e-5, monkeypatch)


@pytest.mark.skipif(not hk.INTERPRETED, reason="a GPU rounds by itself")
@pytest.mark.parametrize(("dtype", "bits", "bound"), [(BF16, 7, 1e-2), (FP16, 10, 1.5e-3)], ids=str)
def test_operands_with_as_few_bits_as_a_gpu_gives_them(
    dtype: torch.dtype, bits: int, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter multiplies in fp32. Here operands are rounded first: to bf16, and to TF32 where fp16 came in; but
    those of (1 + M)^-1, three TF32 products of which are as good as fp32."""
    plain = interpreter.InterpreterBuilder.create_dot
    rounded = set()

    def create_dot(self: Any, a: Any, b: Any, total: Any, precision: Any, most: int) -> Any:
        rounded.add(str(precision).rpartition(".")[2].lower())
        if "x3" not in str(precision).lower():
            a, b = (interpreter.TensorHandle(rounded_to(x.data, bits), x.dtype.scalar) for x in (a, b))
        return plain(self, a, b, total, precision, most)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    table = tmp_path / "table.json"
    chosen = {"chunk": 32, "tf32": 1, "num_warps": 4, "num_stages": 1}
    table.write_text(json.dumps({"ops": {"delta_pairs": [{"max_size": None, "config": chosen}]}}))
    found = arguments(1, 70, 1, 1, 16, 8, dtype)
    found[3] *= 0.02  # what was written long ago is read
    judge(hk.Limits("interpreter", processors=2, table=str(table)), found, None, bound, monkeypatch)
    assert rounded == {"tf32x3", "ieee" if dtype == BF16 else "tf32"}


def rounded_to(x: Any, bits: int) -> Any:
    """fp32 to nearest even of ``bits`` bits of mantissa."""
    cut, word = 23 - bits, x.view(numpy.uint32)
    word = word + (numpy.uint32((1 << cut - 1) - 1) + ((word >> numpy.uint32(cut)) & numpy.uint32(1)))
    return (word & numpy.uint32(2**32 - (1 << cut))).view(numpy.float32)


def test_an_empty_share_has_its_state() -> None:
    found = arguments(1, 0, 1, 1, 3, 2, FP32)
    out, last = hk.gated_delta_fwd(*found)
    gradients = hk.gated_delta_bwd(out, last + 1, *found)
    assert not out.numel() and torch.equal(last, found[5]) and torch.equal(gradients[5], last + 1)
    assert [x.shape for x in gradients] == [x.shape for x in found]


def test_who_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU does unasked; not keys of more features than fit a program's registers, and not the CPU."""
    registry, dims = load_plugins().registry, {"key_dim": (128,), "value_dim": (128, 256)}
    monkeypatch.setattr(triton_package, "INTERPRETED", False)

    def serves(device: str, **more: tuple[int, ...]) -> str:
        signature = Signature("gated_delta_rule", device, BF16, device, dims=dims | more)
        return resolve(registry, [signature]).provider("gated_delta_rule")

    assert serves("cuda") == "triton" and serves("cpu") == "aten"
    assert serves("cuda", key_dim=(192,)) == "aten"
    with pytest.raises(UserError, match="key_dim 192 is over 128"):
        signature = Signature("gated_delta_rule", "cuda", BF16, "cuda", dims={"key_dim": (192,)})
        resolve(registry, [signature], {"gated_delta_rule": "triton"})
    by_feature = SPECS["gated_delta_rule"].features
    signature = Signature("gated_delta_rule", "cuda", BF16, "cuda", dims=dims, features=by_feature)
    assert resolve(registry, [signature]).provider("gated_delta_rule") == "triton"  # a decay per key feature
