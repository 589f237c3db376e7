"""docs/first_cluster.md, command by command, on two network namespaces as hosts."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from hetero_megatron.testbed.namespaces import address
from tests.slow.test_commands import find_blocks
from tests.support.namespace_hosts import NamespaceHosts, missing
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.testbed("hosts")]


def test_the_tutorial(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    blocks = [block.code for block in find_blocks((ROOT / "docs/first_cluster.md").read_text(), "first_cluster.md")]
    code = "\n".join(blocks).replace("/shared/job", str(tmp_path / "job"))
    for index in (0, 1):
        code = code.replace(f"10.0.0.{index + 1}", address(index))
    (tmp_path / "job").mkdir()
    with NamespaceHosts(tmp_path, 2) as hosts:
        (tmp_path / "bin").mkdir()
        ssh = tmp_path / "bin" / "ssh"  # takes no notice of options
        ssh.write_text(
            '#!/bin/sh\nwhile [ "$1" = -o ] || [ "$1" = -p ]; do shift 2; done\n[ "$1" = -- ] && shift\n'
            f'exec {shlex.join(hosts.ssh.split())} "$@"\n'
        )
        ssh.chmod(0o755)
        path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        job = hosts.start(["bash", "-euo", "pipefail", "-c", code], PATH=path, OMP_NUM_THREADS="1")
        out, err = job.communicate(timeout=500)
        assert job.returncode == 0, out[-6000:] + err[-6000:]
        assert hosts.no_orphans() == []
    text = (tmp_path / "job" / "cluster.yaml").read_text()
    assert "interface: eth0" in text and "rates:" in text and address(1) in text
    assert "this plan" in (tmp_path / "job" / "plan.html").read_text()
    assert "Memory of each rank" in (tmp_path / "job" / "run" / "report.html").read_text()
    assert "[rank 1]" in out or "[rank 0]" in out
