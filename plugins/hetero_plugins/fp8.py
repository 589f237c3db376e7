"""Products in fp8 on NVIDIA GPUs that have it (Ada, Hopper, later): ``torch._scaled_mm`` where operands have one scale,
Triton kernels where blocks have theirs. Where Triton is, its kernels quantise in either case. On the CPU all run by
request, for tests."""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch
from torch.nn import functional as F

from hetero_megatron.ops.gemm_fp8 import BLOCKWISE, HYBRID, TENSORWISE, Blockwise, Fp8Gemm, Quantised, Tensorwise
from hetero_megatron.ops.spec import TRITON, VENDOR, Capability, Kernel, Signature
from hetero_megatron.platform.plugins import PluginApi, source_file
from hetero_plugins.triton_package import INTERPRETED
from hetero_plugins.triton_package import supports as triton_supports

HETERO_PLUGIN_API = 1

TILE = 16  # cuBLAS wants axes of fp8, and addresses, to be multiples
FIRST_CHIP = (8, 9)


def scaled_mm(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """a [m, n], b [k, n], each with one scale -> a b^T [m, k]."""
    m, k = a.data.shape[0], b.data.shape[0]
    scales = _aligned(a.scale), _aligned(b.scale)
    made = torch._scaled_mm(_padded(a.data), _padded(b.data).t(), *scales, out_dtype=dtype)
    return made if made.shape == (m, k) else made[:m, :k].contiguous()


def _aligned(scale: torch.Tensor) -> torch.Tensor:
    """cuBLAS refuses a scale that does not lie at a multiple of 16 bytes, as one of a row of scales may."""
    return scale.clone() if scale.data_ptr() % TILE else scale


def _padded(x: torch.Tensor) -> torch.Tensor:
    """With rows one after another in memory, both axes filled up with zeros (bytes of zero) to whole tiles."""
    odd = (0, -x.shape[1] % TILE, 0, -x.shape[0] % TILE)
    return F.pad(x.contiguous().view(torch.uint8), odd).view(x.dtype) if any(odd) else x.contiguous()


def block_mm(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    kernels = importlib.import_module("hetero_kernels")
    return kernels.gemm_fp8_blocks(a.data, a.scale, b.data, b.scale, dtype)  # type: ignore[no-any-return]


def quantise_whole(x: torch.Tensor, kind: torch.dtype, largest: torch.Tensor, turned: bool) -> list[Quantised]:
    data, scale = importlib.import_module("hetero_kernels").quantise_fp8(x, kind, largest, turned)
    return list(map(Quantised, data.unbind(0), scale.unbind(0)))


def quantise_blocks(x: torch.Tensor, kind: torch.dtype, blocks: str) -> Quantised:
    kernels = importlib.import_module("hetero_kernels")
    return Quantised(*kernels.quantise_fp8_blocks(x, kind, blocks))


def _has_fp8(signature: Signature) -> list[str]:
    if signature.platform == "nvidia" and signature.arch < FIRST_CHIP:
        return [f"chip {'.'.join(map(str, signature.arch))} does not compute in fp8"]
    return []


def register(api: PluginApi) -> None:
    capability = Capability(
        platforms=("nvidia", "cpu"), automatic=("cuda",), dtypes=(torch.bfloat16, torch.float16, torch.float32),
        features=(HYBRID,),
    )  # fmt: skip
    api.kernel(_kernel(TENSORWISE, "scaled_mm", VENDOR, Fp8Gemm(Tensorwise(scaled_mm)), capability, False))
    if source_file("hetero_kernels.gemm_fp8") is not None:
        fused = Fp8Gemm(Tensorwise(scaled_mm, quantise_whole))
        # Of the vendor's kind by its product, and before the one that quantises operator by operator.
        api.kernel(replace(_kernel(TENSORWISE, "triton", VENDOR, fused, capability, True), priority=1))
        gemm = Fp8Gemm(Blockwise(block_mm, quantise_blocks))
        api.kernel(_kernel(BLOCKWISE, "triton", TRITON, gemm, capability, True))


def _kernel(op: str, provider: str, kind: str, gemm: Fp8Gemm, capability: Capability, triton: bool) -> Kernel:
    def supports(signature: Signature) -> list[str]:
        return _has_fp8(signature) + (triton_supports(signature) if triton else [])

    return Kernel(
        op, provider, kind, gemm.forward, gemm.backward, capability, supports, parts=gemm.parts,
        interpreted=triton and INTERPRETED,
    )  # fmt: skip
