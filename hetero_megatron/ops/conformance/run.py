"""One call of one kernel on one case: forward and backward in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_megatron.ops.bind import bind
from hetero_megatron.ops.conformance.compare import cast, copy_args, flatten, oracle
from hetero_megatron.ops.conformance.subject import CheckHooks, Subject, judge_all
from hetero_megatron.ops.gemm import WeightGradients, bind_gemm
from hetero_megatron.ops.gemm_fp8 import NAMES as FP8_PRODUCTS
from hetero_megatron.ops.gemm_fp8 import bind_gemm_fp8
from hetero_megatron.ops.grouped_gemm import bind_grouped_gemm
from hetero_megatron.ops.registry import reference_kernel
from hetero_megatron.ops.spec import REFERENCE, Case, Kernel, OpSpec, Signature, seeded

# Elements on each side: as many as a block of a kernel that forgot its mask stores too many.
GUARD = 16_384
OUT_OF_BOUNDS = "wrote out of bounds"
_INTEGER = 0x5A5A5A  # stands for NaN in integers; larger than any index that is meant

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.empty_strided.default,
    _aten.new_empty_strided.default, _aten.empty_permuted.default,
}  # fmt: skip
_FILLED = {
    _aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.full.default,
    _aten.full_like.default, _aten.new_full.default, _aten.ones.default, _aten.ones_like.default,
}  # fmt: skip


@dataclass
class _Buffer:
    base: torch.Tensor
    before: torch.Tensor  # a copy of the guards (or of everything, for inputs)
    whole: bool
    what: str


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


class Sandbox(TorchDispatchMode):
    """While active, ``torch.empty`` and its like give guarded memory full of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[_Buffer] = []

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            return self._guarded(out, None, "an output")
        if func in _FILLED:
            return self._guarded(out, out, "an output")
        return out

    def place(self, x: torch.Tensor, may_change: bool = False) -> torch.Tensor:
        """``x`` with the same strides between guards, gaps included; it may not change unless ``may_change``."""
        return self._guarded(x, x, "an argument", whole=not may_change)

    def _guarded(
        self, like: torch.Tensor, values: torch.Tensor | None, what: str, whole: bool = False
    ) -> torch.Tensor:
        if like.dtype == torch.bool or like.is_quantized:
            return like
        size, stride = like.size(), like.stride()
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if like.numel() else 0
        fill = float("nan") if like.is_floating_point() else _INTEGER % (torch.iinfo(like.dtype).max + 1)
        base = torch.full((span + 2 * GUARD,), fill, dtype=like.dtype, device=like.device)
        inner = base.as_strided(size, stride, GUARD)
        if values is not None and like.numel():
            if 0 in stride and any(n > 1 and s == 0 for n, s in zip(size, stride, strict=True)):
                base[GUARD:-GUARD] = values.reshape(-1)[0]  # an expanded scalar
            else:
                inner.copy_(values)
        saved_bytes = base.clone() if whole else torch.cat([base[:GUARD], base[-GUARD:]])
        self._buffers.append(_Buffer(base, saved_bytes, whole, what))
        return inner

    def damage(self) -> list[str]:
        """What was written that must not be; empty if nothing."""
        problems = []
        for b in self._buffers:
            if b.whole and torch.equal(_bits(b.base), _bits(b.before)):
                continue
            guards = torch.cat([b.base[:GUARD], b.base[-GUARD:]])
            guards_before = torch.cat([b.before[:GUARD], b.before[-GUARD:]])
            if not torch.equal(_bits(guards), _bits(guards_before)):
                index = int((_bits(guards) != _bits(guards_before)).nonzero()[0]) // b.base.element_size()
                where_outside = f"{GUARD - index} before" if index < GUARD else f"{index - GUARD + 1} after"
                problems.append(f"{OUT_OF_BOUNDS}: {where_outside} {b.what} of {b.base.numel() - 2 * GUARD} elements")
            elif b.whole:
                problems.append(f"changed {b.what}, which it does not declare")
        return list(dict.fromkeys(problems))


class Unguarded:
    """Memory as it is, for a quick look: arguments are copies, and nothing is noticed of writes beyond them. (A
    dispatch mode imports torch's compiler first, which takes seconds.)"""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def place(self, x: torch.Tensor, may_change: bool = False) -> torch.Tensor:
        """A copy with the same strides."""
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device).copy_(x)

    def damage(self) -> list[str]:
        return []


Box = type[Sandbox] | type[Unguarded]


@dataclass
class CallOutcome:
    """What one call gave. ``damage``: illegal writes."""

    results: list[torch.Tensor]
    saved: tuple[Any, ...] = ()
    gradients: list[torch.Tensor] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)


def place(spec: OpSpec, kernel: Kernel, args: Sequence[Any], box: Sandbox | Unguarded) -> tuple[Any, ...]:
    """Guarded copies of the arguments; those that the kernel may change are only guarded at their ends."""
    out: list[Any] = []
    for name, value in zip(spec.args, args, strict=True):
        change = name in spec.in_place or name in kernel.overwrites
        out.append(copy_args([value], lambda x: box.place(x, change))[0])  # noqa: B023 (called at once)
    return tuple(out)


def call_forward(spec: OpSpec, kernel: Kernel, args: Sequence[Any], guard: Box = Sandbox) -> CallOutcome:
    """Forward in a sandbox; for in-place operators the results are the changed arguments."""
    box = guard()
    placed = place(spec, kernel, args, box)
    with box, torch.no_grad():
        outputs = kernel.forward(*placed)
    if not isinstance(outputs, tuple):
        raise TypeError(f"forward returned {type(outputs).__name__}, not a tuple")
    _require_tensors(spec.results, outputs, placed)
    if spec.in_place:
        changed = [placed[spec.args.index(name)] for name in spec.in_place]
        return CallOutcome(flatten(changed), damage=box.damage())
    count = len(spec.results)
    total = count + (0 if kernel.private else len(spec.extras))
    if len(outputs) < total or (not kernel.private and len(outputs) > total):
        raise TypeError(f"forward returned {len(outputs)} values, not {total}: {', '.join(spec.results + spec.extras)}")
    saved = outputs[count:] if kernel.private else tuple((*placed, *outputs)[spec.index(name)] for name in spec.saves)
    return CallOutcome(list(outputs[:count]), saved, damage=box.damage())


def call_backward(
    spec: OpSpec, kernel: Kernel, grads: Sequence[torch.Tensor], saved: Sequence[Any], args: Sequence[Any],
    after: Sequence[Any] = (), guard: Box = Sandbox,
) -> tuple[list[torch.Tensor], list[str]]:  # fmt: skip
    """(gradients of the arguments that are there, illegal writes).

    Args:
        after: what a split operator's backward gets between saved state and options.
    """
    assert kernel.backward is not None
    box = guard()
    may_change = kernel.private  # private state may be used up
    incoming = [box.place(g) for g in grads]
    saved_copies = copy_args(list(saved), lambda x: box.place(x, may_change))
    after_copies = copy_args(list(after), box.place)
    with box, torch.no_grad():
        grads_out = kernel.backward(*incoming, *saved_copies, *after_copies, *args[len(spec.tensors) :])
    if not isinstance(grads_out, tuple) or len(grads_out) != len(spec.gradients):
        raise TypeError(f"backward returned {grads_out if not isinstance(grads_out, tuple) else len(grads_out)} values"
                        f", not a tuple of {len(spec.gradients)}")  # fmt: skip
    is_given = [args[spec.args.index(name)] is not None for name in spec.gradients]
    out = []
    for name, gradient, has_gradient in zip(spec.gradients, grads_out, is_given, strict=True):
        if has_gradient:
            if gradient is None:
                raise TypeError(f"backward returned None for {name}")
            out.append(gradient)
    _require_tensors([n for n, has_gradient in zip(spec.gradients, is_given, strict=True) if has_gradient], out, args)
    return out, box.damage()


def _require_tensors(names: Sequence[str], results: Sequence[Any], args: Sequence[Any]) -> None:
    """TypeError unless everything that a kernel made is a plain tensor where its arguments are."""
    device = next((x.device for x in flatten(list(args))), None)  # none where lists are empty
    for name, value in zip(names, results):  # a wrong number of them is the caller's to name
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is of type {type(value).__name__}, not a tensor")
        if (device is not None and value.device != device) or value.layout != torch.strided:
            raise TypeError(f"{name} is a tensor on {value.device} ({value.layout}), not on {device} (strided)")
        if value.is_complex():
            raise TypeError(f"{name} is complex")



def call_trained(
    spec: OpSpec, kernel: Kernel, args: Sequence[Any], grads: Sequence[torch.Tensor], times: int, guard: Box = Sandbox
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[str]]:
    """(results, gradients of each of ``times`` backwards, illegal writes) through autograd, as the model calls the
    kernel."""
    bound = {"gemm": bind_gemm, "grouped_gemm": bind_grouped_gemm}.get(spec.name)
    box = guard()
    placed = list(place(spec, kernel, args, box))
    if spec.name in FP8_PRODUCTS:
        call = bind_gemm_fp8(kernel, WeightGradients(), placed.pop())
        placed.append(None)  # no other rank has a part of these tensors
    else:
        call = bind(spec, kernel) if bound is None else bound(kernel, WeightGradients())
    incoming = [box.place(g) for g in grads]
    inputs = [placed[i].requires_grad_() for i in map(spec.args.index, spec.gradients) if placed[i] is not None]
    gradients = []
    with box:
        results = flatten(call(*placed))
        live = results[: len(spec.results) - len(spec.fixed)]
        for count in range(times):
            runs_again = count + 1 < times
            grads_once = torch.autograd.grad(seeded(live, incoming), inputs, retain_graph=runs_again, allow_unused=True)
            gradients.append([torch.zeros_like(x) if g is None else g for g, x in zip(grads_once, inputs, strict=True)])
    return [x.detach() for x in results], gradients, box.damage()


def seeds(spec: OpSpec, args: Sequence[Any]) -> list[torch.Tensor]:
    """Incoming gradients of the results that carry some; not constant."""
    results = spec.fake(*args)[: len(spec.results) - len(spec.fixed)]
    generator = torch.Generator().manual_seed(99)
    return [
        torch.randn(r.shape, dtype=torch.float64, generator=generator).to(r.dtype).to(r.device) for r in results
    ]


CASES, ELEMENTS = 2, 5_000  # at most, besides one for each optional feature that is called
SLACK = 8.0  # times the kit's bounds: what is wrong here is wrong by far
DOUBLE = 1e-9  # in fp64, where libraries sum in other orders


def wrong_kernels(
    used: Iterable[tuple[OpSpec, Kernel, Signature]], device: torch.device, synchronize: Callable[[], None]
) -> dict[str, str]:
    """By kernel, why it cannot be trusted. The definitions are not compared with themselves. Neither random numbers nor
    torch's settings change.

    Args:
        used: operators with their kernels, and what they will be called with.
        synchronize: waits for the device.
    """
    problems: dict[str, str] = {}
    for spec, kernel, signature in used:
        if kernel.kind == REFERENCE:
            continue
        subject = Subject(spec, kernel, device, signature.dtype, CheckHooks(synchronize=synchronize))
        for case in _cases(spec, kernel, signature):
            _, problem = subject.attempt("at start", case.name, lambda: problems.update(_compare(subject, case)))  # noqa: B023
            if problem:
                problems[str(kernel)] = f"{case.name}: {problem}"
            if str(kernel) in problems:
                break
    return problems


def _cases(spec: OpSpec, kernel: Kernel, signature: Signature) -> Iterator[Case]:
    """The first small ones, which are made one by one, and one for each feature."""
    small = (c for c in spec.cases() if 0 < sum(x.numel() for x in flatten(list(c.args))) <= ELEMENTS)
    able_cases = (c for c in small if set(c.features) <= set(kernel.capability.features))
    yield from islice(able_cases, CASES)
    features_left = set(signature.features) & {*spec.features, *kernel.capability.features}
    for case in able_cases if features_left else ():
        if features_left & set(case.features):
            features_left -= set(case.features)
            yield case
        if not features_left:
            return


def _compare(subject: Subject, case: Case) -> dict[str, str]:
    """Forward, and backward as the model calls it."""
    spec, kernel = subject.spec, subject.kernel
    args = cast(spec, case, subject.dtype, subject.device)
    trained = bool(spec.gradients) and not spec.split
    grads = seeds(spec, args) if trained else None
    wants, want_gradients = oracle(spec, args, grads)
    definition = reference_kernel(spec)
    eager = call_forward(spec, definition, args, Unguarded)
    gradients: list[torch.Tensor] = []
    if grads is None:
        results = call_forward(spec, kernel, args, Unguarded).results
    else:
        eager.gradients, _ = call_backward(spec, definition, grads, eager.saved, args, guard=Unguarded)
        results, (gradients,), _ = call_trained(spec, kernel, args, grads, 1, Unguarded)
    forward_cap, cap = (SLACK * bound for bound in spec.bounds.of(subject.dtype))
    if subject.dtype == torch.float64:
        forward_cap = cap = DOUBLE
    names = [n for n in spec.gradients if args[spec.args.index(n)] is not None]
    problem = judge_all(results, wants, eager.results, forward_cap, SLACK)
    if not problem and trained:
        failure = judge_all(gradients, want_gradients, eager.gradients, cap, SLACK, names)
        problem = failure and f"gradient of {failure}"
    return {str(kernel): f"{case.name}: {problem}"} if problem else {}


def used_kernels(registry: Any, choices: Any) -> list[tuple[OpSpec, Kernel, Signature]]:
    """Of a kernel plan's choices."""
    return [(registry.spec(op), choice.kernel, choice.signature) for op, choice in sorted(choices.items())]
