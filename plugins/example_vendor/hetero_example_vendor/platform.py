"""The device. Replace CPU by Accelerator and say what your adapter calls things."""

from __future__ import annotations

from hetero_megatron.platform import CPU, Limits


class ExampleVendor(CPU):
    name = "example_vendor"
    vendor = "example_vendor"
    limits = Limits(max_warps=8, max_grid=65_535)
