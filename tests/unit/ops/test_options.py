"""The kit varies every option of every operator: a kernel that takes one for granted is found, whatever it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_megatron.ops import SPECS, Signature
from hetero_megatron.ops.conformance import FAIL, check_kernel
from hetero_megatron.ops.conformance.checks import LARGE
from hetero_megatron.ops.conformance.compare import flatten
from hetero_megatron.ops.registry import reference_kernel
from hetero_megatron.ops.spec import Case, Kernel, OpSpec

CPU = torch.device("cpu")
# What models and papers use: each option has a value beyond these, too, which nobody can have built in.
COMMON: dict[str, tuple[Any, ...]] = {
    "eps": (1e-5, 1e-6, 1e-8, 1e-12), "beta1": (0.9,), "beta2": (0.95, 0.98, 0.99, 0.999), "lr": (1e-2, 1e-3, 1e-4),
    "weight_decay": (0.0, 0.01, 0.1), "grad_scale": (1.0,), "step": (1,), "scale": (1.0, 2.5), "alpha": (1.0, 1.702),
    "limit": (7.0,), "softcap": (None, 30.0, 50.0), "window": (None,), "documents": (None,), "q_start": (0,),
    "k_start": (0,), "start": (0,), "top_k": (1, 2, 8), "groups": (1,), "top_groups": (1,), "group_size": (1,),
    "rate": (0.0, 0.1), "sample": (0,), "feature": (0,), "dropout": (None,),
}  # fmt: skip
Place = tuple[int, str]  # of an option in the arguments, and a field of it or ""


def small_cases(spec: OpSpec) -> list[Case]:
    """Those of ``plugins check --quick``."""
    return [c for c in spec.cases() if 0 < sum(x.numel() for x in flatten(list(c.args))) <= LARGE]


def places(spec: OpSpec) -> Iterator[tuple[str, Place]]:
    """Of all options and optional tensors, and of the fields of those that have some."""
    cases = small_cases(spec)
    for name in (*spec.options, *spec.optional):
        index = spec.args.index(name)
        yield name, (index, "")
        fields = next((c.args[index]._fields for c in cases if hasattr(c.args[index], "_fields")), ())
        yield from ((f"{name}.{field}", (index, field)) for field in fields)


def read(args: Sequence[Any], place: Place) -> Any:
    value = args[place[0]]
    return getattr(value, place[1], None) if place[1] else value


def values(spec: OpSpec, place: Place) -> list[Any]:
    """The distinct ones of an option over the small cases; tensors only count as being there."""
    found: dict[str, Any] = {}
    for case in small_cases(spec):
        value = read(case.args, place)
        if not place[1] or case.args[place[0]] is not None:
            found.setdefault("a tensor" if isinstance(value, torch.Tensor) else repr(value), value)
    return list(found.values())


def taking(spec: OpSpec, place: Place, value: Any) -> Kernel:
    """The definition with ``value`` for whatever it is given there, in forward and backward alike."""
    right = reference_kernel(spec)

    def fixed(function: Callable[..., Any], inputs: Sequence[str]) -> Callable[..., Any]:
        """``inputs``: names of the arguments, the last ones of the call that are names at all."""

        def call(*args: Any) -> Any:
            own = list(args)
            at = inputs.index(spec.args[place[0]])
            if not place[1]:
                own[at] = value
            elif own[at] is not None:
                own[at] = own[at]._replace(**{place[1]: value})
            return function(*own)

        return call

    name = spec.args[place[0]]
    forward = fixed(right.forward, spec.args)
    backward = right.backward
    if backward is not None:
        given = ("",) * (len(spec.results) - len(spec.fixed)) + spec.saves + spec.options
        if spec.split:
            given = ("",) + spec.saves + ("", "", "") + spec.options
        if name in given:
            backward = fixed(backward, given)
    return replace(right, provider="ignorant", forward=forward, backward=backward)


def found(spec: OpSpec, kernel: Kernel, dtype: torch.dtype, place: Place, value: Any) -> bool:
    """Whether the kit finds it in the cases that have another value there (in the rest it is the definition)."""
    there = (case for case in small_cases(spec) if not place[1] or case.args[place[0]] is not None)
    cases = [case for case in there if not same(read(case.args, place), value)]
    if not cases:
        return False
    only = replace(spec, cases=lambda: cases)
    checks = check_kernel(only, kernel, CPU, lambda d: Signature(spec.name, "cpu", d, "cpu"), (dtype,))
    return any(finding.status == FAIL for finding in checks)


def same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and one == other)


WITH_OPTIONS = sorted(name for name, spec in SPECS.items() if any(True for _ in places(spec)))


@pytest.mark.parametrize("op", WITH_OPTIONS)
def test_every_option_takes_an_unusual_value(op: str) -> None:
    spec = SPECS[op]
    for name, place in places(spec):
        taken, last = values(spec, place), name.rpartition(".")[2]
        assert len(taken) >= 2, f"{op}: {name} is always {taken}"
        if last in COMMON:
            assert any(value not in COMMON[last] for value in taken), f"{op}: {name} only takes common values: {taken}"


@pytest.mark.parametrize("op", WITH_OPTIONS)
def test_a_kernel_that_ignores_an_option_is_found(op: str) -> None:
    """Whichever of the kit's values it takes instead, or whichever is common."""
    spec, missed = SPECS[op], []
    for name, place in places(spec):
        taken = values(spec, place)
        others = taken + [value for value in COMMON.get(name, ()) if value not in taken]
        for value in others:
            if isinstance(value, torch.Tensor):
                continue
            for dtype in (torch.float32, torch.bfloat16)[: 2 if value is others[0] else 1]:
                if not found(spec, taking(spec, place, value), dtype, place, value):
                    missed.append(f"{name} taken as {value} in {dtype}")
    assert not missed, f"{op}: " + "; ".join(missed)
