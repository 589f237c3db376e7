"""All operators of this version, with the providers that need nothing but torch: the reference and aten."""

from __future__ import annotations

from hetero_megatron.ops import (
    activation,
    attention_cpu,
    attention_op,
    dropout,
    gemm,
    gemm_fp8,
    grouped_gemm,
    linear_cross_entropy,
    moe_permute,
    norm,
    optimizer_ops,
    rope,
    router,
    softmax,
    vocab_cross_entropy,
)
from hetero_megatron.ops.cross_entropy import KERNELS as CROSS_ENTROPY_KERNELS
from hetero_megatron.ops.cross_entropy import SPEC as CROSS_ENTROPY_SPEC  # the package's `cross_entropy` is a function
from hetero_megatron.ops.kernel import REFERENCE, Capability, Kernel
from hetero_megatron.ops.registry import Registry
from hetero_megatron.ops.spec import OpSpec

SPECS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        *norm.SPECS,
        rope.SPEC,
        *activation.SPECS,
        softmax.SPEC,
        CROSS_ENTROPY_SPEC,
        vocab_cross_entropy.SPEC,
        linear_cross_entropy.SPEC,
        *attention_op.SPECS,
        dropout.SPEC,
        gemm.SPEC,
        *gemm_fp8.SPECS,
        grouped_gemm.SPEC,
        *moe_permute.SPECS,
        router.SPEC,
        *optimizer_ops.SPECS,
    )
}


_REFERENCE_PARTS = {
    "gemm": gemm.REFERENCE_PARTS,
    **gemm_fp8.REFERENCE_PARTS,
    "grouped_gemm": grouped_gemm.REFERENCE_PARTS,
    "linear_cross_entropy": linear_cross_entropy.REFERENCE_PARTS,
}


# Where definitions are not chosen unasked on any device: attention's holds scores of every query with every key, and
# those of fp8 multiply in fp32 what a chip was asked to multiply in fp8.
_NEVER_UNASKED_ON_DEVICES = ("attention", *gemm_fp8.NAMES)


def reference_kernel(spec: OpSpec) -> Kernel:
    """The definition itself as a provider: any device, any dtype."""
    return Kernel(
        spec.name, REFERENCE, REFERENCE, spec.forward, spec.backward, version=spec.version,
        parts=_REFERENCE_PARTS.get(spec.name, {}), traceable=True,
        capability=Capability(
            automatic=("cpu", "meta") if spec.name in _NEVER_UNASKED_ON_DEVICES else None, features=spec.features
        ),
    )  # fmt: skip


ATEN_KERNELS: tuple[Kernel, ...] = (
    *norm.KERNELS,
    *rope.KERNELS,
    *activation.KERNELS,
    *softmax.KERNELS,
    *CROSS_ENTROPY_KERNELS,
    *vocab_cross_entropy.KERNELS,
    *linear_cross_entropy.KERNELS,
    attention_cpu.KERNEL,
    *attention_op.KERNELS,
    *dropout.KERNELS,
    *gemm.KERNELS,
    *grouped_gemm.KERNELS,
    *moe_permute.KERNELS,
    *router.KERNELS,
    *optimizer_ops.KERNELS,
)


def torch_registry() -> Registry:
    """A new registry with the reference and aten; plugins are added to it."""
    return Registry(SPECS, (*map(reference_kernel, SPECS.values()), *ATEN_KERNELS))
