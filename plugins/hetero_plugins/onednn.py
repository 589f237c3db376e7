"""Matrix products in fp32 by oneDNN, which comes with torch, on CPUs with AVX-512 that are not Intel's.

aten multiplies fp32 by torch's BLAS, MKL, which uses AVX-512 on Intel's CPUs only. oneDNN does on all. Few rows stay
with aten, where a call of oneDNN takes longer than the product.

oneDNN generates code for each shape that it meets and keeps it, about half a MiB. How many rows an expert gets differs
from call to call, so products of these are of few, rounded numbers of rows. That and copies take more than is gained on
AMD's CPUs before family 26 (Zen 5), which compute 512 bits in two halves: there it is 1.1 times as fast as aten, and
products of experts stay with that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.ops import gemm, grouped_gemm
from hetero_megatron.ops.spec import VENDOR, Capability, Kernel, Signature
from hetero_megatron.platform.plugins import PluginApi

HETERO_PLUGIN_API = 1
INTEL, AMD = "GenuineIntel", "AuthenticAMD"
WHOLE = 26  # first family of AMD's CPUs that compute 512 bits at once

Product = Callable[..., Any]
TILE = 64
LEAST = 16  # rows below which aten is faster
PART = 1 << 20  # elements of operands that are multiplied at once, where they are copied into another order


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b of any strides. x: [m, k]; weight: [n, k]; bias: [n] or None -> [m, n]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _parts(size: int, others: int) -> Iterator[slice]:
    """Of an axis of ``size``, so that each part times ``others`` elements is about ``PART``."""
    count = max(TILE, PART // max(others, 1) // TILE * TILE)
    return (slice(start, min(start + count, size)) for start in range(0, size, count))


def _left_to_aten(rows: int, *sizes: int) -> bool:
    return rows < LEAST or 0 in sizes


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    rows, (n, k) = x.numel() // max(x.shape[-1], 1), weight.shape
    if _left_to_aten(rows, n, k):
        return gemm.linear_forward(x, weight, bias)
    flat = x.reshape(rows, k)
    if weight.numel() <= PART:
        return (_product(flat, weight, bias).view(*x.shape[:-1], n),)
    y = x.new_empty(*x.shape[:-1], n)
    for part in _parts(n, max(rows, k)):
        y.view(rows, n)[:, part] = _product(flat, weight[part], None if bias is None else bias[part])
    return (y,)


def input_gradient(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, (n, k) = dy.numel() // max(dy.shape[-1], 1), weight.shape
    if _left_to_aten(rows, n, k):
        return gemm.input_gradient(dy, weight)
    flat = dy.reshape(rows, n)
    if weight.numel() <= PART:
        return _product(flat, weight.t()).view(*dy.shape[:-1], k)
    first, *more = _parts(n, max(rows, k))
    dx = _product(flat[:, first], weight[first].t())
    for part in more:
        dx.add_(_product(flat[:, part], weight[part].t()))
    return dx.view(*dy.shape[:-1], k)


def weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0
) -> torch.Tensor:
    dy, x = dy.flatten(0, -2), x.flatten(0, -2)
    (rows, n), k = dy.shape, x.shape[1]
    if _left_to_aten(rows, n, k) or (into is not None and into.dtype != dy.dtype):
        return gemm.weight_gradient(dy, x, into, beta)
    if into is None:
        into, beta = dy.new_empty(n, k), 0.0
    for part in _parts(n, max(rows, k)):
        found = _product(dy[:, part].t(), x.t())
        if beta:
            into[part].add_(found)
        else:
            into[part].copy_(found)
    return into


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    dbias = None if bias is None else dy.flatten(0, -2).sum(0)
    return input_gradient(dy, weight), weight_gradient(dy, x), dbias


def _step(rows: int) -> int:
    """What the rows of a group are rounded to multiples of: a quarter of a power of 2, so sizes are few."""
    return max(TILE, 1 << rows.bit_length() >> 3)


def _windows(ends: torch.Tensor, total: int) -> Iterator[tuple[int, slice, slice, slice]]:
    """(group, its rows, so many rows of all ``total`` around them that oneDNN is to multiply, where they are in these)
    of all groups that have rows."""
    for group, rows in grouped_gemm.groups(ends):
        count = rows.stop - rows.start
        size = count if count < LEAST else min(-(-count // _step(count)) * _step(count), total)
        start = min(rows.start, total - size)
        inside = slice(rows.start - start, rows.stop - start)
        yield group, rows, slice(start, start + size), inside


def grouped_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
) -> tuple[torch.Tensor]:
    y = x.new_empty(x.shape[0], weight.shape[1])
    for g, rows, window, inside in _windows(ends, len(x)):
        y[rows] = forward(x[window], weight[g], None if bias is None else bias[g])[0][inside]
    return (y,)


def grouped_input_gradient(dy: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    dx = dy.new_empty(dy.shape[0], weight.shape[2])
    for g, rows, window, inside in _windows(ends, len(dy)):
        dx[rows] = input_gradient(dy[window], weight[g])[inside]
    return dx


def grouped_weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0
) -> torch.Tensor:
    return grouped_gemm.weight_gradient(dy, x, ends, into, beta, _gradient_of_group)


def _gradient_of_group(dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor, beta: float) -> None:
    """Here a foreign row would count, so aten takes what is over."""
    rows = len(dy)
    middle = rows - rows % _step(rows)
    if middle:
        weight_gradient(dy[:middle], x[:middle], into, beta)
        beta = 1.0
    if middle < rows:
        gemm.weight_gradient(dy[middle:], x[middle:], into, beta)


def grouped_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    dbias = None if bias is None else grouped_gemm.bias_gradient(dy, ends)
    return grouped_input_gradient(dy, weight, ends), grouped_weight_gradient(dy, x, ends), dbias


def cpu_says(key: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the CPU says of itself, e.g. ``vendor_id``: ``AuthenticAMD``; empty where the system does not tell."""
    try:
        found = re.search(rf"^{key}[ \t]*:[ \t]*(\S+)", cpuinfo.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


def _supports(signature: Signature) -> list[str]:
    if not torch.backends.mkldnn.is_available():
        return ["this torch was built without oneDNN"]
    simd = torch.backends.cpu.get_cpu_capability()
    if simd != "AVX512":
        return [f"the CPU has {simd}, not AVX512: no faster than aten"]
    if torch.backends.mkl.is_available() and cpu_says("vendor_id") == INTEL:
        return ["MKL, which aten calls, uses AVX-512 on Intel's CPUs: no faster than aten"]
    return []


def _supports_groups(signature: Signature) -> list[str]:
    family = cpu_says("cpu family")
    if cpu_says("vendor_id") == AMD and family.isdigit() and int(family) < WHOLE:
        return _supports(signature) or [f"the CPU (family {family}) computes AVX-512 in halves: no faster than aten"]
    return _supports(signature)


def register(api: PluginApi) -> None:
    capability = Capability(platforms=("cpu",), dtypes=(torch.float32,), compile_ok=False)
    parts: dict[str, Product] = {"input": input_gradient, "weight": weight_gradient}
    grouped: dict[str, Product] = {"input": grouped_input_gradient, "weight": grouped_weight_gradient}
    api.kernel(Kernel("gemm", "onednn", VENDOR, forward, backward, capability, _supports, parts=parts))
    of_groups = grouped_forward, grouped_backward
    api.kernel(Kernel("grouped_gemm", "onednn", VENDOR, *of_groups, capability, _supports_groups, parts=grouped))
