"""Settings for all tests. They hold before torch is first imported, and in the ranks that tests start."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.pool import close_special_pools

# Ranks share two cores: one thread each. Nothing is looked up on a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton decides when kernels are imported whether they are compiled or interpreted (which the CPU needs).
if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Times differ between machines: no deadline per example. In CI the same examples every time, so that no
# change is blamed for a case that was never drawn before; everywhere else new ones.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure() -> None:
    gc.disable()  # nothing that is imported or collected is garbage


def testbed_kind(item: pytest.Item) -> str:
    """Empty: the test emulates no cluster."""
    mark = item.get_closest_marker("testbed")
    return "" if mark is None else "".join(mark.args) or "testbed"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Ours in place of ``--dist loadscope``."""
    if config.getoption("dist") != "loadscope":
        return None
    from tests.support.scopes import Scopes

    return Scopes(config, log)


def pytest_collection_finish() -> None:
    """A million objects of modules and tests live to the end: no garbage collection looks at them again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def pools_end_with_their_module() -> Iterator[None]:
    yield
    close_special_pools()


@pytest.fixture(scope="session")
def forked_programs() -> Iterator[Path]:
    """A folder with ``python``, ``hetero-megatron`` and ``torchrun``, as in ``.venv/bin``, which start at once."""
    from tests.support.quick_start import serving

    with serving(os.environ) as programs:
        yield programs


@pytest.fixture(autouse=True)
def one_testbed_at_a_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a kind: tests run in several processes, and those of the testbed look for what is left of theirs here."""
    if not (kind := testbed_kind(request.node)):
        yield
        return
    with (Path(tempfile.gettempdir()) / f"hetero_megatron_tests_{kind}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
