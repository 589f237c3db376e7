"""Fixtures of tests on emulated devices (``plugins/emulated_vendor``)."""

from __future__ import annotations

import pytest

from tests.support.pool import Pool, shared_pool
from tests.support.vendors import build_emulated


@pytest.fixture(scope="session")
def extension() -> None:
    """The emulated device's extension is built: minutes, once per environment."""
    build_emulated()


@pytest.fixture
def pool(extension: None, request: pytest.FixtureRequest) -> Pool:
    """``EMULATED_RANKS`` of the test's module, each on an emulated device."""
    return shared_pool(("emulated",) * request.module.EMULATED_RANKS)
