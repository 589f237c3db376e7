"""Operators: one per file, each beside the reference that defines it."""

from hetero_megatron.ops.activation import gelu, squared_relu, swiglu
from hetero_megatron.ops.attention import attention
from hetero_megatron.ops.cross_entropy import cross_entropy
from hetero_megatron.ops.norm import layer_norm, rms_norm
from hetero_megatron.ops.rope import apply_rope, rope_frequencies, rope_tables

__all__ = [
    "apply_rope",
    "attention",
    "cross_entropy",
    "gelu",
    "layer_norm",
    "rms_norm",
    "rope_frequencies",
    "rope_tables",
    "squared_relu",
    "swiglu",
]
