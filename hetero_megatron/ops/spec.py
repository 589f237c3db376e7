"""What an operator is: its definition, its results and saved state, its shapes, its cost, and how exact it must be.

An operator is called with positional arguments: tensors and lists of tensors first, options (numbers, flags)
last. ``forward(*args)`` returns a tuple: the results, then the *extras* that backward needs besides arguments and
results. ``backward(*grads, *saved, *options)`` returns one gradient per name in ``gradients``. Saved state in the
shape that the spec names is *portable*: any provider's backward takes any provider's forward's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]
Forward = Callable[..., tuple[Any, ...]]
Backward = Callable[..., tuple[Any, ...]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that an operator on ``dtype`` computes in: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Case:
    """Arguments for the conformance kit: floating-point tensors in fp64 on the CPU, cast by the kit.

    ``features``: optional ones of the operator that it uses; kernels without them are not asked for it.
    """

    name: str
    args: tuple[Any, ...]
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes that one call must at least compute and move."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Bounds:
    """Largest relative Frobenius errors against fp64 per dtype: forward, gradients (research part 8.2)."""

    fp32: tuple[float, float] = (1e-6, 1e-6)
    fp16: tuple[float, float] = (1e-3, 1e-3)
    bf16: tuple[float, float] = (5e-3, 5e-3)

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """Those of one dtype."""
        tolerances = {torch.float64: (1e-13, 1e-12), torch.float16: self.fp16, torch.bfloat16: self.bf16}
        return tolerances.get(dtype, self.fp32)


@dataclass(frozen=True)
class OpSpec:
    """One operator.

    Args:
        version: of this contract; a kernel says which one it implements.
        tensors: names of its tensor arguments, in order; options: of the others, after them.
        results: names of what it returns; ``fixed`` of them carry no gradient.
        extras: further results of forward, for backward.
        saves: which arguments, results and extras backward gets, in order.
        gradients: arguments that backward returns gradients of; empty: the operator has no backward.
        definition: plain torch, differentiable, in at least fp32; returns the results as a tuple.
        forward, backward: the reference: forward by the definition, backward by an explicit formula or by autograd
            through the definition.
        fake: arguments -> empty results and extras of the right shape and dtype.
        flops: of forward, from the arguments.
        backward_flops: times forward's.
        wide: arguments that stay in at least fp32 when the rest is 16-bit.
        in_place: arguments that the operator changes; it returns nothing.
        split: forward and backward are called apart (a collective lies between), not through autograd.
        cases: for the conformance kit; speed: one large case for timing.
        lists: arguments that are lists of tensors.
        parts: further functions that every kernel of it must bring, by name.
        features: parts of the contract that a kernel may lack (``Capability.features``): then it serves no stage that
            needs them.
        upgrade: makes a kernel of an earlier version one of this; None: of one that cannot serve any more.
        schema: types of the options for torch.library, e.g. ``float eps``; None: not offered as a torch operator.
    """

    name: str
    tensors: tuple[str, ...]
    options: tuple[str, ...]
    results: tuple[str, ...]
    definition: Callable[..., tuple[Any, ...]]
    forward: Forward
    backward: Backward | None
    fake: Callable[..., tuple[Any, ...]]
    flops: Callable[..., int]
    cases: Callable[[], Iterable[Case]]
    speed: Callable[[], Case] | None = None
    extras: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    split: bool = False
    version: int = 1
    backward_flops: float = 2.0
    bounds: Bounds = field(default_factory=Bounds)
    parts: tuple[str, ...] = ()
    schema: str | None = ""
    optional: tuple[str, ...] = ()  # tensor arguments that may be None
    features: tuple[str, ...] = ()
    upgrade: Callable[[Any], Any] | None = None

    @property
    def args(self) -> tuple[str, ...]:
        return self.tensors + self.options

    @property
    def differentiable(self) -> bool:
        return bool(self.gradients)

    def index(self, name: str) -> int:
        """Position of a saved name in (arguments, results, extras)."""
        return (self.args + self.results + self.extras).index(name)

    def forward_cost(self, *args: Any) -> Cost:
        """Every argument is read once and every result written once, those in place too."""
        changed = [args[self.args.index(name)] for name in self.in_place]
        return Cost(self.flops(*args), count_bytes((args, self.fake(*args), changed)))

    def backward_cost(self, *args: Any) -> Cost:
        """Saved state and incoming gradients are read once, gradients written once."""
        outputs = self.fake(*args)
        saved = [(*args, *outputs)[self.index(name)] for name in self.saves]
        incoming = outputs[: len(self.results)]
        outgoing = [args[self.args.index(name)] for name in self.gradients]
        return Cost(round(self.backward_flops * self.flops(*args)), count_bytes((saved, incoming, outgoing)))


def count_bytes(value: Any) -> int:
    """Bytes of all tensors in a nested structure."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(count_bytes(x) for x in value) if isinstance(value, (tuple, list)) else 0


def reference_forward(
    definition: Callable[..., tuple[Any, ...]], extras: Callable[..., Tensors] | None = None
) -> Forward:
    """Forward by the definition; ``extras(*args)`` are its further results."""

    def forward(*args: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            return (*definition(*args), *(extras(*args) if extras is not None else ()))

    return forward


class _Seeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grads: Sequence[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return torch.empty((), device=outputs[0].device)  # nobody reads it

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.grads)


def seeded(outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """A scalar to go backward from, which gives ``outputs`` the gradients ``grads``, of their shapes.

    Autograd, given gradients itself, imports torch's symbolic shapes to compare two sizes, and with them SymPy: half a
    CPU second of every process.
    """
    return _Seeded.apply(tuple(grads), *outputs)  # type: ignore[no-any-return, no-untyped-call]


def autograd_backward(
    definition: Callable[..., tuple[Any, ...]],
    arrange: Callable[..., tuple[Any, ...]],
    num_grads: int,
    gradients: tuple[int, ...],
) -> Backward:
    """Backward by autograd through the definition.

    Args:
        arrange: (saved, options) -> the operator's arguments.
        num_grads: results that carry gradients, the first ones.
        gradients: positions of the arguments to differentiate.
    """

    def backward(*values: Any) -> tuple[Any, ...]:
        grads, inputs = values[:num_grads], values[num_grads:]
        args = list(arrange(*inputs))
        for i in gradients:
            args[i] = args[i].detach().requires_grad_() if args[i] is not None else None
        with torch.enable_grad():
            results = definition(*args)[:num_grads]
            wanted_inputs = [args[i] for i in gradients if args[i] is not None]
            gradients_left = iter(torch.autograd.grad(seeded(results, grads), wanted_inputs, allow_unused=True))
        return tuple(None if args[i] is None else next(gradients_left) for i in gradients)

    return backward


def uniform(*shape: int, seed: int, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    """fp64 values for cases, a function of shape and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.rand(*shape, dtype=torch.float64, generator=generator) * (high - low) + low


def normal(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator) * scale


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
        details = ", ".join([sizes] * bool(sizes) + list(self.features))
        return f"{self.op}({kind} on {self.platform or self.device}{', ' + details if details else ''})"


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
            beyond_bound = [v for v in s.dims.get(name, ()) if v > bound]
            if beyond_bound:
                out.append(f"{name} {max(beyond_bound)} is over {bound}")
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
        why = self.supports(signature)
        assert isinstance(why, list), f"{self}: supports() must return a list of reasons, not {type(why).__name__}"
        return out + why

    def chosen_unasked(self, signature: Signature) -> bool:
        return self.capability.automatic is None or signature.device in self.capability.automatic


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "unknown"


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
