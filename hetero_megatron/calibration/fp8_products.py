"""Seconds of products in fp8 outside of pipelines: those of a layer's linear modules, at the sizes that runs have."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch

from hetero_megatron.calibration.layers import Job
from hetero_megatron.calibration.measure import LEAST, repeated
from hetero_megatron.calibration.operators import timed
from hetero_megatron.ops.gemm_fp8 import HYBRID, TENSORWISE, largest_of
from hetero_megatron.ops.spec import Kernel
from hetero_megatron.spec import ModelSpec, shares, stage_tensors, tensor_box
from hetero_megatron.utils.text import notice_line

Fp8Tables = dict[str, dict[str, list[list[float]]]]  # by section of the rates: its tables


def measure_fp8(
    job: Job, spec: ModelSpec, tp: Sequence[int], rows: Sequence[int], length: int, calls: int
) -> Fp8Tables:
    """``gemm`` and ``gemm_backward`` of each of the job's kernels for products in fp8; nothing where it has none.

    Args:
        tp: degrees, of whose shares the weights are; rows: sizes of micro-batches, of sequences of ``length`` tokens.
        calls: of each product; medians count.
    """
    tables_by_dtype: Fp8Tables = {}
    shapes = [(b, *shape) for shape in linear_shapes(spec, tp) for b in rows]
    for recipe, kernel in job.fp8.items():
        tables: dict[str, list[list[float]]] = {"gemm": [], "gemm_backward": []}
        try:
            for b, outputs, inputs in shapes:
                measure = partial(_product, job, kernel, b, length, outputs, inputs)
                forward, *backward = (max(s, LEAST) for s, _ in repeated(measure, calls))
                size = [b * length, outputs, inputs]
                tables["gemm"].append([*size, forward])
                tables["gemm_backward"].append([*size, *backward])
        except RuntimeError as error:  # a library that refuses these products costs the rest of the rates nothing
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            text = f"{kernel.op}:{kernel.provider} fails, so that products in fp8 ({recipe}) have no rates: {why}"
            print(notice_line(f"rank {job.comm.rank}: {text}"), file=sys.stderr, flush=True)
            continue
        tables_by_dtype[f"fp8_{recipe}"] = tables
    return tables_by_dtype


def linear_shapes(spec: ModelSpec, tp: Sequence[int]) -> list[tuple[int, int]]:
    """(outputs, inputs) of the linear modules of a dense layer on the first rank of a group of each of these degrees;
    those of latents, which are whole everywhere, among them."""
    shapes_found = dict[tuple[int, int], None]()
    for share in dict.fromkeys(shares(spec, (1,) * degree)[0] for degree in tp):
        for tensor in stage_tensors(spec, range(spec.num_layers), False, False):
            module = tensor.name.split(".")[-2]
            if "proj" not in module or ".experts." in tensor.name or not tensor.name.endswith(".weight"):
                continue
            box = tensor_box(tensor, share)
            outputs, inputs = (hi - lo for lo, hi in zip(box.lo, box.hi, strict=True))
            if outputs and inputs:
                shapes_found[outputs, inputs] = None
    return list(shapes_found)


def _product(job: Job, kernel: Kernel, b: int, length: int, n: int, k: int) -> list[float]:
    """Seconds of forward and of the gradients of x and w, with all that quantises their operands."""
    device, gradient_dtype = job.comm.device, torch.promote_types(job.dtype, torch.float32)
    x, w, dy = (torch.randn(*size, dtype=job.dtype, device=device) for size in ((b, length, k), (n, k), (b, length, n)))
    into, hybrid = torch.zeros(n, k, dtype=gradient_dtype, device=device), HYBRID in kernel.capability.features
    largest = dict.fromkeys(("x", "w", "dy"), cast(torch.Tensor | None, None))

    def find(**tensors: torch.Tensor) -> None:
        if kernel.op == TENSORWISE:
            largest.update({name: largest_of(tensor) for name, tensor in tensors.items()})

    def forward() -> None:
        find(x=x, w=w)
        kernel.forward(x, w, None, hybrid, largest["x"], largest["w"])

    def for_input() -> None:
        find(dy=dy)
        kernel.parts["input"](dy, w, hybrid, largest["dy"], largest["w"])

    def for_weight() -> None:
        kernel.parts["weight"](dy, x, hybrid, into, 1.0, largest["dy"], largest["x"])

    with torch.no_grad():
        return timed(job.comm.clock, forward, for_input, for_weight)
