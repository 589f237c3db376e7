"""Which cases of a law are run by ``make test``; the others by ``make test-slow``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Arguments for ``parametrize``: all cases, those that are not chosen marked as slow."""
    cases = list(cases)
    assert set(chosen) <= set(cases), "a chosen case is none"
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases]
