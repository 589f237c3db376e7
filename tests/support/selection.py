"""Which cases of a law are run by ``make test``, which by ``make test-slow``, and which by ``make test-exhaustive``
alone."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
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
