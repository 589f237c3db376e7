"""Which cases of a law are run by ``make test``, which by ``make test-slow``, and which by ``make test-exhaustive``
alone."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], chosen: Collection[Any], slow: Collection[Any] | None = None) -> list[Any]:
    """Arguments for ``parametrize``: all cases; those that are not chosen are marked as slow, or, where ``slow`` names
    cases, as exhaustive but for these. Where a count of cases is asked for (``make test-parity N=500``) all are run."""
    cases = list(cases)
    if "N" in os.environ:
        return cases
    assert {*chosen, *(slow or ())} <= set(cases), "a chosen case is none"

    def marked(case: Any) -> Any:
        mark = pytest.mark.slow if slow is None or case in slow else pytest.mark.exhaustive
        return pytest.param(case, marks=mark)

    return [case if case in chosen else marked(case) for case in cases]


def each(name: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test is run with every case as its argument ``name``, all of them as one test; a failure names the case."""
    cases = list(cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**others: Any) -> None:
            for case in cases:
                try:
                    test(**others, **{name: case})
                except BaseException as error:
                    error.add_note(f"{name} = {case!r}")
                    raise

        rest = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        assert len(rest) + 1 == len(signature.parameters), f"{test.__name__} has no argument {name}"
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return decorate
