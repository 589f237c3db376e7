"""Which provider serves which operator of a stage: decided once, when the model is built; then frozen.

The order is: a provider that the user asked for, then vendor kernels, Triton, aten, the reference. A requested
provider that cannot serve is an error with its reasons. Nothing that happens inside a kernel changes the choice.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.ops.bind import bind
from hetero_megatron.ops.gemm import Products, WeightGradients, bind_gemm, bind_joint_gemm, separate, watched_joint_gemm
from hetero_megatron.ops.gemm_fp8 import HYBRID, bind_gemm_fp8
from hetero_megatron.ops.gemm_fp8 import NAMES as FP8_PRODUCTS
from hetero_megatron.ops.grouped_gemm import bind_grouped_gemm
from hetero_megatron.ops.linear_cross_entropy import bind_linear_cross_entropy
from hetero_megatron.ops.registry import Registry, unknown
from hetero_megatron.ops.spec import ORDER, REFERENCE, Kernel, Signature

_PRODUCTS = {"gemm": bind_gemm, "grouped_gemm": bind_grouped_gemm}
EVERY = "all"  # the key that asks one provider for every operator that it has


class KernelWarning(UserWarning):
    """A choice that the user should know of."""


@dataclass(frozen=True)
class KernelChoice:
    """One operator's kernel, whether it was asked for, and why kernels of better rank were passed over."""

    kernel: Kernel
    signature: Signature
    requested: bool
    rejected: tuple[tuple[str, tuple[str, ...]], ...]


class KernelPlan:
    """The kernels of one stage, as attributes: ``plan.rms_norm(x, weight, eps)``.

    Attributes:
        choices: by operator name.
        weight_gradients: who takes those of ``gemm``, ``grouped_gemm`` and the products in fp8, and where they wait
            while they are deferred.
        fp8: the product in fp8 that the linear modules of layers call; None: ``gemm``.
        rms_norm, rope, …: one callable per operator of the plan.
        joint_gemm: ``gemm`` of one input and several weights: (x, weights, biases) -> a result each.
    """

    def __init__(
        self, registry: Registry, choices: Mapping[str, KernelChoice], calls: Mapping[str, Any] | None = None
    ) -> None:
        self.registry = registry
        self.choices = dict(choices)
        self.weight_gradients = WeightGradients()
        self.fp8 = next((op for op in FP8_PRODUCTS if op in self.choices), None)
        for op, choice in self.choices.items():
            call = (calls or {}).get(op)
            setattr(self, op, self._call(choice) if call is None else call)
        if "gemm" in self.choices:
            self.joint_gemm = self._joint_gemm()

    def _joint_gemm(self) -> Products:
        choice = self.choices["gemm"]
        if choice.signature.compiled:  # which knows nothing of where weights lie
            return separate(self.gemm)
        return bind_joint_gemm(choice.kernel, self.weight_gradients, self.gemm)

    def _call(self, choice: KernelChoice) -> Any:
        from hetero_megatron.ops.library import compiled_call

        spec, kernel = self.registry.spec(choice.kernel.op), choice.kernel
        if choice.signature.compiled and not kernel.traceable:
            return compiled_call(spec, kernel)
        if spec.name in _PRODUCTS:
            return _PRODUCTS[spec.name](kernel, self.weight_gradients, choice.signature.compiled)
        if spec.name in FP8_PRODUCTS:
            return bind_gemm_fp8(kernel, self.weight_gradients, HYBRID in choice.signature.features)
        if spec.name == "linear_cross_entropy":
            return bind_linear_cross_entropy(spec, kernel, self.weight_gradients)
        return bind(spec, kernel, choice.signature.compiled)

    def __getattr__(self, name: str) -> Any:  # reached only for operators that are not in the plan
        if name.startswith("_"):
            raise AttributeError(name)
        raise unknown("operator in this kernel plan", name, self.__dict__.get("choices", {}), "kernels")

    def provider(self, op: str) -> str:
        return self.choices[op].kernel.provider

    def providers(self) -> dict[str, str]:
        """Provider by operator."""
        return {op: c.kernel.provider for op, c in sorted(self.choices.items())}

    def digest(self) -> str:
        """16 hex digits of what serves what, for the log and for agreement between the ranks of a stage."""
        rows = [f"{op}={c.kernel.provider}/{c.kernel.version}:{c.signature}" for op, c in sorted(self.choices.items())]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]

    def summary(self) -> str:
        """One line: operators by provider, and what computes in fp8."""
        ops_of_provider: dict[str, list[str]] = {}
        for op, provider in self.providers().items():
            ops_of_provider.setdefault(provider, []).append(op)
        text = "; ".join(f"{provider}: {', '.join(ops)}" for provider, ops in sorted(ops_of_provider.items()))
        if self.fp8 is None:
            return text
        signature = self.choices[self.fp8].signature
        kind = "hybrid" if HYBRID in signature.features else "e4m3"
        recipe = self.fp8.removeprefix("gemm_fp8_")
        weights = str(signature.dtype).removeprefix("torch.")
        return f"linear modules of layers in fp8 ({kind}, {recipe}), all else in {weights}; {text}"

    def why(self) -> list[str]:
        """Lines about what was passed over: kernels meant for this platform that could not serve, with the reasons."""
        ops_of_reason: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for op, choice in sorted(self.choices.items()):
            for name, reasons in choice.rejected:
                kernel, signature = self.registry.kernel(op, name), choice.signature
                meant = not kernel.capability.platforms or signature.platform in kernel.capability.platforms
                if meant and kernel.chosen_unasked(signature):
                    ops_of_reason.setdefault((name, reasons), []).append(op)
        return [
            f"  not {name} for {', '.join(ops)}: {'; '.join(reasons)}" for (name, reasons), ops in ops_of_reason.items()
        ]

    def format(self) -> str:
        """A table: operator, provider, whether it was asked for, what was passed over and why."""
        lines = list[str]()
        for op, choice in sorted(self.choices.items()):
            mark = "requested" if choice.requested else ""
            lines.append(f"  {op:<28}{choice.kernel.provider:<12}{mark:<11}".rstrip())
            lines += [f"    not {name}: {'; '.join(reasons)}" for name, reasons in choice.rejected]
        return "\n".join(lines)

    def with_calls(self, calls: Mapping[str, Any]) -> KernelPlan:
        """This plan with some callables replaced (for capturing and comparing)."""
        plan = KernelPlan(self.registry, self.choices, {op: calls.get(op, getattr(self, op)) for op in self.choices})
        plan.weight_gradients = self.weight_gradients  # ``gemm`` is bound to these
        if "gemm" in calls:
            plan.joint_gemm = watched_joint_gemm(plan.gemm)
        elif "gemm" in self.choices:
            plan.joint_gemm = self.joint_gemm
        return plan


def resolve(
    registry: Registry,
    signatures: Iterable[Signature],
    requests: Mapping[str, str] | None = None,
    field: str = "kernels",
) -> KernelPlan:
    """Choose a kernel for every signature (one per operator).

    Args:
        requests: provider by operator, or under ``all`` for every operator that the provider has.
        field: where the requests were read, for messages.

    Raises:
        UserError: an unknown operator or provider, a requested provider that cannot serve (with its reasons), or two
            providers of equal rank.
    """
    requests = dict(requests or {})
    general = requests.pop(EVERY, None)
    for op, provider in requests.items():
        registry.kernel(op, provider, f"{field}.{op}")  # also of operators that this stage does not call
    if general is not None and general not in registry.providers():
        raise unknown("provider", general, registry.providers(), f"{field}.{EVERY}")
    choices = {}
    for signature in signatures:
        op = signature.op
        request, place = requests.get(op), f"{field}.{op}"
        if request is None and general is not None and any(k.provider == general for k in registry.kernels(op)):
            request, place = general, f"{field}.{EVERY}"
        choices[op] = _requested(registry, signature, request, place) if request else _first(registry, signature, place)
    return KernelPlan(registry, choices)


def _reasons(kernel: Kernel, signature: Signature) -> list[str]:
    """Why a kernel cannot serve; a predicate that raises is its plugin's mistake, and named."""
    try:
        return kernel.reasons(signature)
    except Exception as error:
        raise UserError(
            f"supports() of {kernel} raised {type(error).__name__}: {error}", field="kernels", value=kernel.provider,
            accepted=f"a plugin that passes `hetero-megatron plugins check`, or {signature.op}=PROVIDER for another",
        ) from error  # fmt: skip


def _requested(registry: Registry, signature: Signature, provider: str, field: str) -> KernelChoice:
    kernel = registry.kernel(signature.op, provider, field)
    reasons = _reasons(kernel, signature)
    if reasons:
        able_providers = [k.provider for k in registry.kernels(signature.op) if not _reasons(k, signature)]
        platforms = kernel.capability.platforms
        elsewhere = "" if not platforms or signature.platform in platforms else (
            f"--platform {' or '.join(platforms)} beside it, or "
        )  # fmt: skip
        raise UserError(
            f"it cannot serve {signature}: {'; '.join(reasons)}",
            field=field, value=provider, accepted=elsewhere + (", ".join(able_providers) or "no provider can serve it"),
        )  # fmt: skip
    return KernelChoice(kernel, signature, True, ())


def _first(registry: Registry, signature: Signature, field: str) -> KernelChoice:
    rejected: list[tuple[str, tuple[str, ...]]] = []
    able_kernels: list[Kernel] = []
    for kernel in registry.kernels(signature.op):
        if able_kernels and _rank(kernel) != _rank(able_kernels[0]):
            break
        reasons = _reasons(kernel, signature)
        if not reasons and not kernel.chosen_unasked(signature):
            reasons = [f"on {signature.device} only by request"]
        if reasons:
            rejected.append((kernel.provider, tuple(reasons)))
        else:
            able_kernels.append(kernel)
    if not able_kernels:
        reasons_text = " | ".join(f"{name}: {'; '.join(reasons)}" for name, reasons in rejected)
        by_request = [k.provider for k in registry.kernels(signature.op) if not _reasons(k, signature)]
        raise UserError(
            f"no provider serves {signature} unasked: {reasons_text or 'none registered'}", field=field,
            accepted=f"by request (--kernels {signature.op}=PROVIDER): {', '.join(by_request)}" if by_request else "",
        )  # fmt: skip
    if len(able_kernels) > 1:
        names = " and ".join(k.provider for k in able_kernels)
        raise UserError(
            f"{names} serve {signature} with equal rank", field=field, accepted=f"one of them by name: {field}=PROVIDER"
        )
    if able_kernels[0].kind == REFERENCE:
        reasons_text = "; ".join(f"{name}: {'; '.join(reasons)}" for name, reasons in rejected) or "there is no other"
        warnings.warn(f"{signature} runs on the slow reference ({reasons_text})", KernelWarning, stacklevel=4)
    return KernelChoice(able_kernels[0], signature, False, tuple(rejected))


def _rank(kernel: Kernel) -> tuple[int, int]:
    return ORDER.index(kernel.kind), kernel.priority
