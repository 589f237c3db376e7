"""Checks of what training does with a kernel beside forward and backward: weight gradients that add up in one buffer,
attention that is composed of tiles, equal bits, and torch.compile."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hetero_megatron.layout.mask import BAND, Tile
from hetero_megatron.ops.attention_op import add_sinks
from hetero_megatron.ops.block_attention import BlockAttention, KeyHeads, TileKernel, accumulators
from hetero_megatron.ops.conformance.compare import cast
from hetero_megatron.ops.conformance.run import OUT_OF_BOUNDS, CallOutcome, Sandbox, call_backward, call_forward, seeds
from hetero_megatron.ops.conformance.subject import SKIP, Finding, Subject, judge_all
from hetero_megatron.ops.library import NAMESPACE, define, operator_name
from hetero_megatron.ops.registry import reference_kernel
from hetero_megatron.ops.spec import Case, normal, wide
from hetero_megatron.ops.tile_kernels import tile_kernel


def weight_gradient(subject: Subject, case: Case, args: tuple[Any, ...], dy: torch.Tensor) -> Iterator[Finding]:
    """``weight`` of gemm, of its forms in fp8 and of grouped_gemm adds to a sum of at least fp32, in that precision;
    with beta 0 nothing is there yet.

    The sum is 16 times the product, so that adding in 16 bits is off by more than the bound.
    """
    x, weight, _, *ends = args
    product: Callable[..., Any] = reference_kernel(subject.spec).parts["weight"]
    want = product(dy.cpu().double(), x.cpu().double(), *(e.cpu() if isinstance(e, torch.Tensor) else e for e in ends))
    typical = float(want.norm()) / max(want.numel(), 1) ** 0.5
    _, cap = subject.spec.bounds.of(subject.dtype)
    for beta in (0.0, 1.0):
        start = 16 * (typical or 1.0) * normal(*weight.shape, seed=5) if beta else torch.full(weight.shape, math.nan)
        box = Sandbox()
        total = box.place(start.to(wide(subject.dtype)).to(subject.device), may_change=True)
        other_args = (box.place(e) if isinstance(e, torch.Tensor) else e for e in ends)
        placed = box.place(dy), box.place(x), *other_args, total, beta
        sum_before = total.cpu().double() if beta else 0.0
        with box, torch.no_grad():
            _, problem = subject.attempt(
                "weight gradient", f"{case.name}, beta {beta:g}", lambda: subject.kernel.parts["weight"](*placed)  # noqa: B023
            )
        # What lies there counts, not what was returned.
        error = float((total.cpu().double() - sum_before - want).norm())
        _, sums = subject.spec.bounds.of(total.dtype)
        if not problem and not error <= cap * float(want.norm()) + sums * float(total.norm()):
            problem = f"the sum of {total.dtype} is off by {error / (float(want.norm()) or 1.0):.2g} of what was added"
        yield subject.finding("weight gradient", f"{case.name}, beta {beta:g}", problem)
        yield subject.finding("bounds", f"{case.name}, weight gradient, beta {beta:g}", "; ".join(box.damage()))


def loss_and_gradients(
    subject: Subject, case: Case, args: tuple[Any, ...], dloss: torch.Tensor,
    wants: tuple[list[torch.Tensor], list[torch.Tensor]], eager: CallOutcome,
) -> Iterator[Finding]:  # fmt: skip
    """``fwd_bwd`` of linear_cross_entropy: the loss and both gradients at once, the weight's added to a sum."""
    x, weight, labels = args
    (want_loss,), (want_dx, want_dw) = wants
    forward_cap, cap = subject.spec.bounds.of(subject.dtype)
    for beta in (None, 0.0, 1.0):
        name = f"{case.name}, {'no sum' if beta is None else f'beta {beta:g}'}"
        box, sum_tensor = Sandbox(), None
        if beta is not None:
            start = normal(*weight.shape, seed=5) if beta else torch.full(weight.shape, math.nan)
            sum_tensor = box.place(start.to(subject.device, wide(subject.dtype)), may_change=True)
        sum_before = sum_tensor.cpu().double() if sum_tensor is not None and beta else torch.zeros_like(want_dw)
        placed = *(box.place(t) for t in (x, weight, labels, dloss)), sum_tensor, 1.0 if beta is None else beta
        call = functools.partial(subject.kernel.parts["fwd_bwd"], *placed)
        with box, torch.no_grad():
            outputs, problem = subject.attempt("loss and gradients", name, call)
        if not problem:
            loss, dx, dw = outputs
            dw = dw if sum_tensor is None else sum_tensor  # what lies there counts, not what was returned
            problem = judge_all([loss, dx], [want_loss, want_dx], [eager.results[0], eager.gradients[0]],
                                max(forward_cap, cap), 3.0, ("loss", "dx"))  # fmt: skip
            error, size = float((dw.cpu().double() - sum_before - want_dw).norm()), float(want_dw.norm())
            if not problem and not error <= cap * size + 1e-6 * float(sum_before.norm()) + 1e-6:
                problem = f"dweight is off by {error / (size or 1.0):.2g} of what was added"
            if not problem and dw.dtype != wide(subject.dtype):
                problem = f"dweight is {dw.dtype}: it is added up in at least fp32"
        yield subject.finding("loss and gradients", name, problem)
        yield subject.finding("bounds", f"{name}, loss and gradients", "; ".join(box.damage()))


class _Watched:
    """A tile kernel, and whether its gradients are wide enough to be added up."""

    def __init__(self, kernel: TileKernel) -> None:
        self.forward, self.delta, self._backward = kernel.forward, kernel.delta, kernel.backward
        self.narrow: set[torch.dtype] = set()

    def backward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradients = self._backward(*args)
        self.narrow |= {x.dtype for x in gradients if x.dtype.itemsize < 4}
        return gradients


def tiles(
    subject: Subject, case: Case, args: tuple[Any, ...], grad: torch.Tensor, eager: CallOutcome,
    wants: tuple[list[torch.Tensor], list[torch.Tensor]],
) -> Iterator[Finding]:  # fmt: skip
    """Attention in two runs of queries to two of keys, as context groups compose it: partial results merge to the
    whole, and gradients by the whole's log-sum-exp, with and without what ``delta`` gives, add up to the whole's.

    Queries, gradients and log-sum-exps of a tile are views: their rows are as far apart as the whole's.
    """
    kernel, (q, k, v, sinks, documents, window, q_start, k_start, softcap, dropout) = subject.kernel, args
    if documents is not None or kernel.private or not q.numel() or not k.numel():
        return  # tiles end where documents do; private state is of one call, which training refuses in groups
    forward_cap, cap = subject.spec.bounds.of(subject.dtype)
    watched = _Watched(tile_kernel(subject.device, kernel, softcap))
    first = q_start if dropout is None else dropout.q_start
    tokens = ((first, first + q.shape[1]),)
    attention = BlockAttention(watched, KeyHeads(q.shape[2] // k.shape[2]), window, tokens=tokens)
    rows = [
        (None, Tile(a, b, c, d, BAND, q_start + a - k_start - c))
        for a, b in _halves(q.shape[1])
        for c, d in _halves(k.shape[1])
    ]

    def composed() -> list[torch.Tensor]:
        sums = accumulators(q)
        attention.forward(q, k, v, rows, *sums, dropout)
        return list(sums if sinks is None else add_sinks(*sums, sinks))

    def gradients(delta: torch.Tensor | None) -> list[torch.Tensor]:
        watched.narrow.clear()
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (q, k, v))
        attention.backward(dout, q, k, v, out, lse, rows, (dq, dk, dv), delta, dropout)
        return [dq, dk, dv]

    box = Sandbox()
    q, k, v, dout = (box.place(x) for x in (q, k, v, grad))
    out, lse = (box.place(x.to(q.device, kind)) for x, kind in zip(wants[0], (q.dtype, wide(q.dtype)), strict=True))

    def attempt(what: str, work: Callable[[], Any]) -> tuple[Any, str]:
        """In the sandbox, which what is returned is judged outside of."""
        with box, torch.no_grad():
            return subject.attempt("tiles", f"{case.name}, {what}", work)

    merged, problem = attempt("merged", composed)
    yield subject.finding(
        "tiles", f"{case.name}, merged", problem or judge_all(merged, wants[0], eager.results, forward_cap, 2.0)
    )
    delta, problem = attempt("delta", lambda: watched.delta(dout, out))
    shape = q.shape[0], q.shape[2], q.shape[1]
    if delta is not None and tuple(delta.shape) != shape:
        problem = f"delta is {tuple(delta.shape)}, not {shape}: [b, heads, queries]"
    if problem:
        yield subject.finding("tiles", f"{case.name}, delta", problem)
    for given_delta in (None,) if problem or delta is None else (None, delta):
        backward_case = f"backward{', delta given' * (given_delta is not None)}"
        grads, problem = attempt(backward_case, lambda: gradients(given_delta))  # noqa: B023
        problem = problem or judge_all(grads, wants[1][:3], eager.gradients[:3], cap, 3.0, subject.spec.gradients)
        if not problem and "share" in kernel.parts and watched.narrow:
            problem = f"share returned {', '.join(map(str, watched.narrow))}: its gradients are added up in fp32"
        yield subject.finding("tiles", f"{case.name}, {backward_case}", problem)
    yield subject.finding("bounds", f"{case.name}, tiles", "; ".join(box.damage()))


def _halves(n: int) -> list[tuple[int, int]]:
    return [(a, b) for a, b in ((0, n // 2), (n // 2, n)) if a < b]


def repeatable(subject: Subject, case: Case) -> Iterator[Finding]:
    """Equal bits from equal inputs, three times, where the kernel says so."""
    spec, kernel = subject.spec, subject.kernel
    if not kernel.capability.deterministic:
        yield Finding(str(kernel), "deterministic", subject.dtype_name, case.name, SKIP, "it does not claim to be")
        return

    def once() -> list[torch.Tensor]:
        args = cast(spec, case, subject.dtype, subject.device)
        outcome = call_forward(spec, kernel, args)
        out = [x.clone() for x in outcome.results]
        if spec.gradients and not spec.split:
            out += call_backward(spec, kernel, seeds(spec, args), outcome.saved, args)[0]
        return out

    runs, problem = subject.attempt("deterministic", case.name, lambda: [once() for _ in range(3)])
    if runs is None:
        yield subject.finding("deterministic", case.name, problem)
        return
    are_equal = all(
        torch.equal(a.nan_to_num(nan=1.5), b.nan_to_num(nan=1.5)) for later in runs[1:] for a, b in zip(runs[0], later)
    )
    yield subject.finding("deterministic", case.name, "" if are_equal else "equal inputs gave unequal bits")


def compiles(subject: Subject, harm: Sequence[Finding]) -> Finding:
    """torch's own checker on the kernel as a torch operator: schema, fake shapes, autograd registration."""
    spec, kernel = subject.spec, subject.kernel
    case = next(iter(spec.cases()))
    if harm:  # torch's checker has no guards around memory
        return Finding(str(kernel), "compile", subject.dtype_name, case.name, SKIP, f"it {OUT_OF_BOUNDS}")

    def check() -> bool:
        define(spec, kernel)
        operator = getattr(getattr(torch.ops, NAMESPACE), operator_name(spec, kernel)).default
        args = cast(spec, case, subject.dtype, subject.device)
        live_args = tuple(
            a.requires_grad_() if n in spec.gradients and a is not None else a
            for n, a in zip(spec.args, args, strict=True)
        )
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(operator, live_args, test_utils=tests)
        return True

    _, problem = subject.attempt("compile", case.name, check)
    return subject.finding("compile", case.name, problem)
