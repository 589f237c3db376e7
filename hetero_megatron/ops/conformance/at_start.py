"""A short check of the kernels that a run is about to use: does each compute here what its operator means?

The kit says whether a kernel is right; this only whether this rank's library, driver and chip compute as the kit's did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from hetero_megatron.ops.conformance.compare import cast, flatten, oracle
from hetero_megatron.ops.conformance.run import Unguarded, call_backward, call_forward, call_trained, seeds
from hetero_megatron.ops.conformance.subject import CheckHooks, Subject, judge_all
from hetero_megatron.ops.registry import reference_kernel
from hetero_megatron.ops.spec import REFERENCE, Case, Kernel, OpSpec, Signature

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
    found: dict[str, str] = {}
    for spec, kernel, signature in used:
        if kernel.kind == REFERENCE:
            continue
        subject = Subject(spec, kernel, device, signature.dtype, CheckHooks(synchronize=synchronize))
        for case in _cases(spec, kernel, signature):
            _, problem = subject.attempt("at start", case.name, lambda: found.update(_compare(subject, case)))  # noqa: B023
            if problem:
                found[str(kernel)] = f"{case.name}: {problem}"
            if str(kernel) in found:
                break
    return found


def _cases(spec: OpSpec, kernel: Kernel, signature: Signature) -> Iterator[Case]:
    """The first small ones, which are made one by one, and one for each feature."""
    small = (c for c in spec.cases() if 0 < sum(x.numel() for x in flatten(list(c.args))) <= ELEMENTS)
    able = (c for c in small if set(c.features) <= set(kernel.capability.features))
    yield from islice(able, CASES)
    wanted = set(signature.features) & {*spec.features, *kernel.capability.features}
    for case in able if wanted else ():
        if wanted & set(case.features):
            wanted -= set(case.features)
            yield case
        if not wanted:
            return


def _compare(subject: Subject, case: Case) -> dict[str, str]:
    """Forward, and backward as the model calls it."""
    spec, kernel = subject.spec, subject.kernel
    args = cast(spec, case, subject.dtype, subject.device)
    trained = bool(spec.gradients) and not spec.split
    grads = seeds(spec, args) if trained else None
    wants, want_gradients = oracle(spec, args, grads)
    plain = reference_kernel(spec)
    eager = call_forward(spec, plain, args, Unguarded)
    gradients: list[torch.Tensor] = []
    if grads is None:
        results = call_forward(spec, kernel, args, Unguarded).results
    else:
        eager.gradients, _ = call_backward(spec, plain, grads, eager.saved, args, guard=Unguarded)
        results, (gradients,), _ = call_trained(spec, kernel, args, grads, 1, Unguarded)
    forward_cap, cap = (SLACK * bound for bound in spec.bounds.of(subject.dtype))
    if subject.dtype == torch.float64:
        forward_cap = cap = DOUBLE
    names = [n for n in spec.gradients if args[spec.args.index(n)] is not None]
    problem = judge_all(results, wants, eager.results, forward_cap, SLACK)
    if not problem and trained:
        worse = judge_all(gradients, want_gradients, eager.gradients, cap, SLACK, names)
        problem = worse and f"gradient of {worse}"
    return {str(kernel): f"{case.name}: {problem}"} if problem else {}


def used_kernels(registry: Any, choices: Any) -> list[tuple[OpSpec, Kernel, Signature]]:
    """Of a kernel plan's choices."""
    return [(registry.spec(op), choice.kernel, choice.signature) for op, choice in sorted(choices.items())]
