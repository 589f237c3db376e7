"""What a provider offers for one operator: functions, and what they can serve, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from hetero_megatron.ops.spec import Backward, Forward

VENDOR, TRITON, ATEN, REFERENCE = "vendor", "triton", "aten", "reference"
# A provider that was asked for comes first; of the rest the first kind that can serve.
ORDER = (VENDOR, TRITON, ATEN, REFERENCE)

ALL_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Signature:
    """What one operator of one stage will be called with, known when the model is built.

    Attributes:
        dims: sizes by name, e.g. ``{"width": (4096, 128)}``: all of them must be served.
        compiled: it is called inside ``torch.compile``.
        deterministic: equal inputs must give equal bits.
        features: what it uses of the operator that not every kernel has, by name (``softcap``).
    """

    op: str
    device: str
    dtype: torch.dtype
    platform: str = ""
    arch: tuple[int, ...] = ()
    dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    compiled: bool = False
    deterministic: bool = False
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {'/'.join(map(str, values))}" for name, values in sorted(self.dims.items()))
        kind = str(self.dtype).removeprefix("torch.")
        more = ", ".join([sizes] * bool(sizes) + list(self.features))
        return f"{self.op}({kind} on {self.platform or self.device}{', ' + more if more else ''})"


@dataclass(frozen=True)
class Capability:
    """What a kernel can serve; the registry checks it. An empty tuple or None: no limit.

    Args:
        devices: torch device types; platforms: names of platforms.
        automatic: device types where it is chosen unasked; None: wherever it can serve.
        arch_min, arch_max: of the chip, inclusive, as the platform numbers them.
        largest: upper bounds of named dims.
        deterministic: equal inputs give equal bits.
        compile_ok: may be called inside ``torch.compile`` (through its torch operator).
        features: of the operator's optional ones (``attention``: softcap, sinks), those that it has.
    """

    devices: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ALL_FLOATS
    automatic: tuple[str, ...] | None = None
    arch_min: tuple[int, ...] | None = None
    arch_max: tuple[int, ...] | None = None
    torch_min: tuple[int, int] | None = None
    largest: Mapping[str, int] = field(default_factory=dict)
    deterministic: bool = True
    compile_ok: bool = True
    features: tuple[str, ...] = ()

    def reasons(self, signature: Signature) -> list[str]:
        """Why it cannot serve ``signature``; empty if it can."""
        s, out = signature, []
        if self.devices and s.device not in self.devices:
            out.append(f"device {s.device}, not {' or '.join(self.devices)}")
        if self.platforms and s.platform not in self.platforms:
            out.append(f"platform {s.platform or 'unknown'}, not {' or '.join(self.platforms)}")
        if s.dtype not in self.dtypes:
            out.append(f"dtype {_name(s.dtype)}, not {' or '.join(map(_name, self.dtypes))}")
        if self.arch_min is not None and s.arch < self.arch_min:
            out.append(f"chip {_dotted(s.arch)} is older than {_dotted(self.arch_min)}")
        if self.arch_max is not None and s.arch > self.arch_max:
            out.append(f"chip {_dotted(s.arch)} is newer than {_dotted(self.arch_max)}")
        if self.torch_min is not None and _torch_version() < self.torch_min:
            out.append(f"torch {_dotted(_torch_version())} is older than {_dotted(self.torch_min)}")
        for name, bound in self.largest.items():
            over = [v for v in s.dims.get(name, ()) if v > bound]
            if over:
                out.append(f"{name} {max(over)} is over {bound}")
        out += [f"it has no {feature}" for feature in s.features if feature not in self.features]
        if s.deterministic and not self.deterministic:
            out.append("it is not deterministic")
        if s.compiled and not self.compile_ok:
            out.append("it cannot be compiled")
        return out


def _none(signature: Signature) -> list[str]:
    return []


@dataclass(frozen=True)
class Kernel:
    """One provider's implementation of one operator: forward and backward together.

    Args:
        provider: its name, unique per operator.
        kind: vendor | triton | aten | reference: decides the order in which providers are tried.
        priority: among kernels of one kind; two that can serve with equal priority are an error.
        forward, backward: as the operator's spec says. With private state, backward gets what ``forward`` returned
            after its results, then the options.
        private: saved state is the kernel's own; else it is the spec's (portable).
        supports: reasons against a signature that the capability cannot express; reads metadata only.
        overwrites: arguments that forward may destroy (nothing else needs them).
        apply: a differentiable callable to use instead of an autograd.Function over forward and backward.
        parts: further functions that an operator knows by name (``gemm``: ``input``, ``weight``; ``attention``: see
            ``ops/tile_kernels.py``).
        interpreted: by Triton's interpreter, on the CPU: results count, times do not.
        traceable: plain torch, so that ``torch.compile`` may look inside.
    """

    op: str
    provider: str
    kind: str
    forward: Forward
    backward: Backward | None
    capability: Capability = Capability()
    supports: Callable[[Signature], list[str]] = _none
    private: bool = False
    version: int = 1
    priority: int = 0
    overwrites: tuple[str, ...] = ()
    apply: Callable[..., object] | None = None
    parts: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    interpreted: bool = False
    traceable: bool = False

    def __str__(self) -> str:
        return f"{self.op}:{self.provider}"

    def reasons(self, signature: Signature) -> list[str]:
        """Why it cannot serve ``signature``: its capability, then its own predicate."""
        out = self.capability.reasons(signature)
        own = self.supports(signature)
        assert isinstance(own, list), f"{self}: supports() must return a list of reasons, not {type(own).__name__}"
        return out + own

    def chosen_unasked(self, signature: Signature) -> bool:
        return self.capability.automatic is None or signature.device in self.capability.automatic


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "unknown"


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
