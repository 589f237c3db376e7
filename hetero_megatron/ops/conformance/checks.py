"""The conformance kit: everything that a kernel must get right before a model trusts it.

Each check answers for one kernel, dtype and case. A kernel that claims a dtype is run with it: a claim that fails is a
failure, not a skip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetero_megatron.ops.conformance.compare import cast, flatten, mismatch, oracle
from hetero_megatron.ops.conformance.parts import (
    compiles,
    loss_and_gradients,
    repeatable,
    tiles,
    weight_gradient,
)
from hetero_megatron.ops.conformance.run import (
    OUT_OF_BOUNDS,
    CallOutcome,
    call_backward,
    call_forward,
    call_trained,
    seeds,
)
from hetero_megatron.ops.conformance.subject import FAIL, SKIP, CheckHooks, Finding, Subject, describe, judge_all
from hetero_megatron.ops.library import offered
from hetero_megatron.ops.registry import reference_kernel
from hetero_megatron.ops.spec import Case, Kernel, OpSpec, Signature

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE = 50_000  # elements; larger cases only run in full, not in --quick


@dataclass(frozen=True)
class Step:
    """The checks of one case: what one process does at least, and what is lost with it at most.

    Args:
        dtype, case: name it within its kernel; of checks that have no case of their own, the check's name.
    """

    kernel: str
    dtype: str
    case: str
    findings: Callable[[], Iterable[Finding]]

    def run(self) -> Iterator[Finding]:
        """Its findings; what a kernel returned and the kit cannot mismatch is one as well."""
        last = "forward"
        try:
            for finding in self.findings():
                last = finding.check
                yield finding
        except GeneratorExit:
            raise
        except BaseException as error:
            problem = f"what it returned cannot be judged: {describe(error)}"
            yield Finding(self.kernel, last, self.dtype, self.case, FAIL, problem)


def check_kernel(
    spec: OpSpec,
    kernel: Kernel,
    device: torch.device,
    signature: Callable[[torch.dtype], Signature],
    dtypes: Iterable[torch.dtype] = DTYPES,
    quick: bool = False,
) -> Iterator[Finding]:
    """All findings about one kernel, checked in this process; arguments as of :func:`kernel_steps`."""
    for step in kernel_steps(spec, kernel, device, signature, dtypes, quick):
        yield from step.run()


def kernel_steps(
    spec: OpSpec,
    kernel: Kernel,
    device: torch.device,
    signature: Callable[[torch.dtype], Signature],
    dtypes: Iterable[torch.dtype] = DTYPES,
    quick: bool = False,
    watch: CheckHooks = CheckHooks(),  # noqa: B008 (it is frozen)
) -> Iterator[Step]:
    """What is to be checked about one kernel, in an order that is the same every time. Any step may be left out.

    Args:
        signature: what the kernel is asked whether it can serve, per dtype.
        quick: leave out cases of more than ``LARGE`` elements.
    """
    name = str(kernel)
    if kernel.backward is None and spec.gradients:
        lacks = Finding(name, "backward", "", "", FAIL, "it has no backward")
        yield Step(name, "", "backward", lambda: [lacks])
        return
    ran, refusals, harm = False, list[str](), list[Finding]()
    for dtype in dtypes:
        subject = Subject(spec, kernel, device, dtype, watch)
        reasons, problem = subject.attempt("supports", "", lambda: kernel.reasons(signature(dtype)))  # noqa: B023
        if problem:
            finding = subject.finding("supports", "", problem)
        elif reasons:
            refusals.append("; ".join(map(str, reasons)))
            finding = Finding(name, "supports", subject.dtype_name, "", SKIP, refusals[-1])
        else:
            ran = True
            yield from _dtype_steps(subject, quick, harm)
            continue
        yield Step(name, subject.dtype_name, "supports", lambda: [finding])  # noqa: B023 (run before the next)
    if not ran:
        why = " | ".join(dict.fromkeys(refusals)) or "no dtype was asked for that the platform has"
        unchecked = Finding(name, "supports", "", "", FAIL, f"nothing of it was checked: {why}")
        yield Step(name, "", "supports", lambda: [unchecked])
    elif offered(spec, kernel):
        last = Subject(spec, kernel, device, torch.float32, watch)
        yield Step(name, last.dtype_name, "compile", lambda: [compiles(last, harm)])


def _dtype_steps(subject: Subject, quick: bool, harm: list[Finding]) -> Iterator[Step]:
    """``harm`` gets what is found of writes out of bounds."""
    name, dtype = str(subject.kernel), subject.dtype_name
    refuted = False

    def run(case: Case, first: bool) -> Iterator[Finding]:
        nonlocal refuted
        subject.changes.clear()
        for finding in _check_case(subject, case, first):
            refuted = refuted or (finding.check == "dtypes" and finding.status == FAIL)
            if finding.check == "bounds" and OUT_OF_BOUNDS in finding.detail:
                harm.append(finding)
            yield finding
        yield subject.finding("global state", case.name, "; ".join(dict.fromkeys(subject.changes)))

    first = True
    for case in subject.spec.cases():
        missing_features = set(case.features) - set(subject.kernel.capability.features)
        if missing_features or (quick and sum(x.numel() for x in flatten(list(case.args))) > LARGE):
            continue
        yield Step(name, dtype, case.name, functools.partial(run, case, first))
        if refuted:
            return  # the claim is false: every other check would say the same
        first = False
    yield Step(name, dtype, "deterministic", lambda: repeatable(subject, next(iter(subject.spec.cases()))))


def _check_case(subject: Subject, case: Case, first: bool) -> Iterator[Finding]:
    spec, kernel = subject.spec, subject.kernel
    args = cast(spec, case, subject.dtype, subject.device)
    outcome, problem = subject.attempt("forward", case.name, lambda: call_forward(spec, kernel, args))
    if outcome is None:
        # A dtype that was claimed and cannot even start is a false claim.
        yield subject.finding("dtypes" if first else "forward", case.name, problem)
        return
    forward_cap, _ = spec.bounds.of(subject.dtype)
    grads = seeds(spec, args) if spec.gradients and not spec.split else None
    wants, want_grads = oracle(spec, args, grads)
    eager = call_forward(spec, reference_kernel(spec), args)
    yield subject.finding("forward", case.name, judge_all(outcome.results, wants, eager.results, forward_cap, 2.0))
    yield subject.finding("result dtypes", case.name, _dtypes(subject, args, outcome))
    yield subject.finding("bounds", case.name, "; ".join(outcome.damage))
    if spec.split:
        yield from _split_backward(subject, case, args, outcome)
    elif grads is not None:
        eager.gradients, _ = call_backward(spec, reference_kernel(spec), grads, eager.saved, args)
        yield from _backward(subject, case, args, grads, outcome, eager, want_grads)
        if first:
            yield from _expanded(subject, case, args, eager)
        if first or kernel.apply is not None or spec.parts:
            yield from _trained(subject, case, args, grads, eager, (wants, want_grads))
        if "weight" in spec.parts:
            yield from weight_gradient(subject, case, args, grads[0])
        if spec.name == "linear_cross_entropy":
            yield from loss_and_gradients(subject, case, args, grads[0], (wants, want_grads), eager)
        if spec.name == "attention":
            yield from tiles(subject, case, args, grads[0], eager, (wants, want_grads))


def _dtypes(subject: Subject, args: tuple[Any, ...], outcome: CallOutcome) -> str:
    if subject.spec.in_place:
        return ""
    expected = subject.spec.fake(*args)
    for name, tensor, want in zip(subject.spec.results, outcome.results, expected):
        # Not every device has fp64: of narrower arguments fp32 is enough.
        enough = want.dtype == torch.float64 != subject.dtype and tensor.dtype == torch.float32
        if tensor.dtype != want.dtype and not enough:
            return f"{name} is {tensor.dtype}, not {want.dtype}"
    return ""


def _backward(
    subject: Subject, case: Case, args: tuple[Any, ...], grads: list[torch.Tensor], outcome: CallOutcome,
    eager: CallOutcome, wants: list[torch.Tensor],
) -> Iterator[Finding]:  # fmt: skip
    spec, kernel, reference = subject.spec, subject.kernel, reference_kernel(subject.spec)
    _, cap = spec.bounds.of(subject.dtype)
    names = [n for n in spec.gradients if args[spec.args.index(n)] is not None]

    def run(check: str, by: Kernel, saved: Sequence[Any]) -> Iterator[Finding]:
        outcome, problem = subject.attempt(check, case.name, lambda: call_backward(spec, by, grads, saved, args))
        if outcome is None:
            yield subject.finding(check, case.name, problem)
            return
        gradients, damage = outcome
        problem = judge_all(gradients, wants, eager.gradients, cap, 3.0, names)
        wrong_dtypes = [n for n, g in zip(names, gradients, strict=True) if g.dtype != args[spec.args.index(n)].dtype]
        problem = problem or (f"the gradient of {wrong_dtypes[0]} has another dtype than it" if wrong_dtypes else "")
        yield subject.finding(check, case.name, problem)
        if by is kernel:
            yield subject.finding("bounds", f"{case.name}, backward", "; ".join(damage))

    if not kernel.private:
        yield subject.finding("saved state", case.name, _saved(subject, outcome, eager))
    yield from run("backward", kernel, outcome.saved)
    if not kernel.private:
        yield from run("swap: reference forward", kernel, eager.saved)
        yield from run("swap: reference backward", reference, outcome.saved)


def _saved(subject: Subject, outcome: CallOutcome, eager: CallOutcome) -> str:
    """Portable state has the shapes, dtypes and values that the spec names."""
    for name, tensor, want in zip(subject.spec.saves, outcome.saved, eager.saved, strict=True):
        if want is None:
            continue
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {want.dtype} {tuple(want.shape)}"
        if name in subject.spec.extras:
            problem = mismatch(tensor, want.double().cpu(), None, 1e-3 if want.dtype.itemsize >= 4 else 2e-2, 1.0)
            if problem:
                return f"{name}: {problem}"
    return ""


def _expanded(subject: Subject, case: Case, args: tuple[Any, ...], eager: CallOutcome) -> Iterator[Finding]:
    """``y.sum().backward()`` gives gradients whose strides are all 0."""
    spec, kernel = subject.spec, subject.kernel
    results = spec.fake(*args)[: len(spec.results) - len(spec.fixed)]
    grads = [torch.ones((), dtype=r.dtype, device=r.device).expand(r.shape) for r in results]
    name = f"{case.name}, expanded gradient"
    run, problem = subject.attempt("backward", name, lambda: call_forward(spec, kernel, args))
    if run is None:
        return
    outcome, problem = subject.attempt("backward", name, lambda: call_backward(spec, kernel, grads, run.saved, args))
    if outcome is not None:
        _, wants = oracle(spec, args, grads)
        _, cap = spec.bounds.of(subject.dtype)
        eager_grads, _ = call_backward(spec, reference_kernel(spec), grads, eager.saved, args)
        problem = judge_all(outcome[0], wants, eager_grads, cap, 3.0)
    yield subject.finding("backward", name, problem)


def _split_backward(subject: Subject, case: Case, args: tuple[Any, ...], outcome: CallOutcome) -> Iterator[Finding]:
    """Backward of vocabulary-parallel cross-entropy, as if other shards had added to peak and normalizer."""
    spec, kernel = subject.spec, subject.kernel
    logits, labels, start = args
    top, total, _ = (x.clone() for x in outcome.results)
    peak, normalizer = torch.where(top.isfinite(), top, 0.0) + 0.5, total + 1.0
    grad = torch.randn(labels.shape, generator=torch.Generator().manual_seed(9)).to(peak.dtype).to(labels.device)
    statistics = [x.clone() for x in (labels, peak, normalizer)]
    assert spec.backward is not None
    wants = spec.backward(grad.double(), logits.double(), labels, peak.double(), normalizer.double(), start)
    eager_grads, _ = call_backward(spec, reference_kernel(spec), [grad], (logits,), args, statistics)
    _, cap = spec.bounds.of(subject.dtype)
    answer, problem = subject.attempt(
        "backward", case.name, lambda: call_backward(spec, kernel, [grad], outcome.saved, args, statistics)
    )
    if answer is not None:
        problem = judge_all(answer[0], [w.cpu() for w in wants], eager_grads, cap, 3.0, spec.gradients)
        yield subject.finding("bounds", f"{case.name}, backward", "; ".join(answer[1]))
    yield subject.finding("backward", case.name, problem)


def _trained(
    subject: Subject, case: Case, args: tuple[Any, ...], grads: list[torch.Tensor], eager: CallOutcome,
    wants: tuple[list[torch.Tensor], list[torch.Tensor]],
) -> Iterator[Finding]:  # fmt: skip
    """Through autograd, as the model calls it, where ``apply`` and ``parts`` come in; backward twice, as
    ``retain_graph`` allows, where nothing is used up."""
    spec, kernel = subject.spec, subject.kernel
    forward_cap, cap = spec.bounds.of(subject.dtype)
    # A callable of the vendor's own may use up what it saved: models run each backward once.
    times = 1 if kernel.private or kernel.overwrites or kernel.apply is not None else 2
    outcome, problem = subject.attempt(
        "training", case.name, lambda: call_trained(spec, kernel, args, grads, times)
    )
    if outcome is not None:
        results, gradients, damage = outcome
        names = [n for n in spec.gradients if args[spec.args.index(n)] is not None]
        problem = judge_all(results, wants[0], eager.results, forward_cap, 2.0)
        for count, gradients_of_run in enumerate(gradients):
            failure = judge_all(gradients_of_run, wants[1], eager.gradients, cap, 3.0, names)
            problem = problem or (failure and f"backward {count + 1}: {failure}")
        yield subject.finding("bounds", f"{case.name}, training", "; ".join(damage))
    yield subject.finding("training", case.name, problem)
