"""Operators: what each means, who serves it, and which provider a stage uses."""

from hetero_megatron.ops.activation import gelu, softcap, squared_relu, swiglu
from hetero_megatron.ops.attention_cpu import attention
from hetero_megatron.ops.cross_entropy import cross_entropy
from hetero_megatron.ops.kernel_plan import KernelPlan, KernelWarning, resolve
from hetero_megatron.ops.norm import layer_norm, rms_norm
from hetero_megatron.ops.registry import SPECS, Registry, torch_registry
from hetero_megatron.ops.rope import Angles, apply_rope, rope_frequencies, rope_tables
from hetero_megatron.ops.spec import Capability, Kernel, OpSpec, Signature
from hetero_megatron.ops.stage import default_kernels, stage_operators

__all__ = [
    "Angles",
    "SPECS",
    "Capability",
    "Kernel",
    "KernelPlan",
    "KernelWarning",
    "OpSpec",
    "Registry",
    "Signature",
    "apply_rope",
    "attention",
    "cross_entropy",
    "default_kernels",
    "gelu",
    "layer_norm",
    "resolve",
    "rms_norm",
    "rope_frequencies",
    "rope_tables",
    "softcap",
    "squared_relu",
    "stage_operators",
    "swiglu",
    "torch_registry",
]
