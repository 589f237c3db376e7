"""A clone of HEAD on this machine installs with `make env` alone, and what was installed starts.

The emulated vendor's library is the one that this environment was made with: nothing new would be seen of its compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NEEDED_BYTES = 4 * 2**30  # a CPU build; measured: 2.5 GiB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run(command: list[str], folder: Path) -> str:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MAKE", "MFLAGS", "VIRTUAL_ENV"))
    }
    kept.setdefault("HETERO_EMULATED_CACHE", str(Path(sys.prefix, "cache", "hetero_emulated_vendor")))
    done = subprocess.run(
        command,
        cwd=folder,
        env=kept,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = done.stdout.decode(errors="replace")
    assert done.returncode == 0, f"{' '.join(command)}\n{output[-4000:]}"
    return output


def test_fresh_clone(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < NEEDED_BYTES:
        pytest.skip(f"less than {NEEDED_BYTES // 2**30} GiB free for a second environment")
    clone = tmp_path / "clone"
    run(["git", "clone", "--quiet", str(ROOT), str(clone)], tmp_path)
    try:
        run(["make", "env"], clone)
        run([".venv/bin/hetero-megatron", "--help"], clone)
        where = run(
            [".venv/bin/python", "-c", "import hetero_megatron; print(hetero_megatron.__file__)"],
            tmp_path / "clone",
        )
        assert where.startswith(str(clone))
        run([".venv/bin/python", "-m", "pip", "check"], clone)
        assert "installing" not in run(["make", "env"], clone)  # the second time there is nothing to do
        assert (
            run(["git", "status", "--short"], clone) == ""
        )  # nothing that git does not ignore was left behind
    finally:
        shutil.rmtree(clone / ".venv", ignore_errors=True)
