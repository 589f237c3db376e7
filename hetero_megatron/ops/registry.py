"""All operators and all kernels that were offered for them. Filled once, then only read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hetero_megatron.errors import UserError
from hetero_megatron.ops import (
    activation,
    attention_cpu,
    attention_op,
    causal_conv,
    dropout,
    gated_delta,
    gemm,
    gemm_fp8,
    grouped_gemm,
    int8_weight,
    linear_cross_entropy,
    moe_permute,
    norm,
    optimizer_ops,
    rope,
    router,
    softmax,
    state_space,
    vocab_cross_entropy,
)
from hetero_megatron.ops.cross_entropy import KERNELS as CROSS_ENTROPY_KERNELS
from hetero_megatron.ops.cross_entropy import SPEC as CROSS_ENTROPY_SPEC  # the package's `cross_entropy` is a function
from hetero_megatron.ops.spec import ORDER, REFERENCE, Capability, Kernel, OpSpec
from hetero_megatron.utils.text import did_you_mean


class Registry:
    """Operators by name, and their kernels in the order in which they were registered."""

    def __init__(self, specs: Mapping[str, OpSpec], kernels: Iterable[Kernel] = ()) -> None:
        self.specs = dict(specs)
        self._kernels: dict[str, dict[str, Kernel]] = {name: {} for name in self.specs}
        for kernel in kernels:
            self.register(kernel)

    def register(self, kernel: Kernel) -> None:
        """Add a kernel.

        Raises:
            UserError: it contradicts its operator's spec, or its provider already serves the operator.
        """
        problem = self.problem(kernel)
        if problem is not None:
            raise problem
        self._kernels[kernel.op][kernel.provider] = upgraded(self.specs[kernel.op], kernel)

    def problem(self, kernel: Kernel) -> UserError | None:
        """Why ``kernel`` cannot be registered."""
        field = f"kernel {kernel}"
        if kernel.op not in self.specs:
            return unknown("operator", kernel.op, self.specs, field)
        spec = self.specs[kernel.op]
        if not kernel.provider or not callable(kernel.forward):
            need = "a provider's name" if not kernel.provider else "a forward that can be called"
            return UserError(f"it lacks {need}", field=field, accepted="Kernel(op, provider, kind, forward, backward)")
        if kernel.kind not in ORDER:
            return UserError("is no kind of provider", field=f"{field}: kind", value=kernel.kind,
                             accepted=", ".join(ORDER))  # fmt: skip
        if upgraded(spec, kernel).version != spec.version:
            return UserError("another version of the operator", field=f"{field}: version", value=kernel.version,
                             accepted=str(spec.version))  # fmt: skip
        if kernel.backward is None and spec.gradients:
            accepted = f"forward and backward together: gradients of {', '.join(spec.gradients)}"
            return UserError("it has no backward", field=field, accepted=accepted)
        missing = [name for name in spec.parts if name not in kernel.parts]
        if missing:
            return UserError(f"it lacks the part {missing[0]}", field=f"{field}: parts", value=sorted(kernel.parts),
                             accepted=", ".join(spec.parts))  # fmt: skip
        if kernel.provider in self._kernels[kernel.op]:
            return UserError("registered twice: its provider already serves this operator", field=field,
                             accepted="one kernel per operator and provider")  # fmt: skip
        return None

    def spec(self, op: str) -> OpSpec:
        if op not in self.specs:
            raise unknown("operator", op, self.specs, "kernels")
        return self.specs[op]

    def kernels(self, op: str) -> tuple[Kernel, ...]:
        """All kernels of an operator: the order of kinds, higher priority first."""
        self.spec(op)
        return tuple(sorted(self._kernels[op].values(), key=lambda k: (ORDER.index(k.kind), -k.priority, k.provider)))

    def kernel(self, op: str, provider: str, field: str = "kernels") -> Kernel:
        """The kernel of one provider.

        Raises:
            UserError: no such operator, or the provider has none for it.
        """
        self.spec(op)
        if provider not in self._kernels[op]:
            raise unknown(f"provider of {op}", provider, self._kernels[op], field)
        return self._kernels[op][provider]

    def providers(self) -> tuple[str, ...]:
        """Names of all providers."""
        return tuple(sorted({provider for kernels in self._kernels.values() for provider in kernels}))

    def __iter__(self) -> Iterator[Kernel]:
        return (kernel for op in sorted(self.specs) for kernel in self.kernels(op))


def upgraded(spec: OpSpec, kernel: Kernel) -> Kernel:
    """One of an earlier version as one of this version, where that can be."""
    if kernel.version == spec.version or spec.upgrade is None:
        return kernel
    newer: Kernel | None = spec.upgrade(kernel)
    return newer or kernel


def unknown(what: str, name: str, registered_names: Iterable[str], field: str) -> UserError:
    """No such name; the message lists the known ones and guesses which was meant."""
    names = sorted(registered_names)
    problem = f"no such {what}{did_you_mean(name, names)}"
    return UserError(problem, field=field, value=name, accepted=", ".join(names) or "none registered")


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
        causal_conv.SPEC,
        gated_delta.SPEC,
        state_space.SPEC,
        dropout.SPEC,
        gemm.SPEC,
        *gemm_fp8.SPECS,
        grouped_gemm.SPEC,
        int8_weight.SPEC,
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
    *causal_conv.KERNELS,
    *gated_delta.KERNELS,
    *state_space.KERNELS,
    *dropout.KERNELS,
    *gemm.KERNELS,
    *grouped_gemm.KERNELS,
    *int8_weight.KERNELS,
    *moe_permute.KERNELS,
    *router.KERNELS,
    *optimizer_ops.KERNELS,
)


def torch_registry() -> Registry:
    """A new registry with the reference and aten; plugins are added to it."""
    return Registry(SPECS, (*map(reference_kernel, SPECS.values()), *ATEN_KERNELS))
