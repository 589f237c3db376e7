"""Without the bridge unlike libraries cannot be joined by mistake: the job refuses or ends within the time-out."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_end_to_end import ENVIRONMENT, ROOT
from tests.vendors import PLUGINS, build_emulated

PLAN = """
seq_length: 16
global_batch_size: 2
pipelines:
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 0, layers: [0, 3]}, {ranks: 1, layers: [3, 6]}]}
"""
# The planted defect: every pair of ranks counts as joined by the library of whoever asks.
WRONG = (
    "import hetero_megatron.comm.islands as i; "
    "i.Islands.route = lambda self, ranks: i.Route(library=self.endpoints[next(iter(ranks))].library); "
    "from hetero_megatron.cli.start import pretrain; pretrain()"
)
SECONDS = 12  # of the time-out


@pytest.mark.timeout(1800)  # building the device takes minutes
@pytest.mark.parametrize("others", [("emulated_vendor", "other"), ("cpu", "")], ids=["another vendor", "the host"])
def test_a_route_by_the_wrong_library_ends_the_job_in_time(others: tuple[str, str], tmp_path: Path) -> None:
    build_emulated()
    (tmp_path / "plan.yaml").write_text(PLAN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-c", WRONG, "--model", "tiny", "--mock-data", "--train-iters", "2", "--lr", "1e-3"]
    words += ["--plan", str(tmp_path / "plan.yaml"), "--distributed-timeout-minutes", str(SECONDS / 60), "--platform"]
    ranks = []
    for rank, (platform, vendor) in enumerate((("emulated_vendor", "one"), others)):
        told = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "PYTHONPATH": str(PLUGINS / "emulated_vendor"), "OMP_NUM_THREADS": "1",
            "HETERO_PLUGINS": "hetero_emulated_vendor.plugin", "HETERO_EMULATED_VENDOR": vendor,
        }  # fmt: skip
        environment, pipe = {**ENVIRONMENT, **told}, subprocess.PIPE
        command = [*words, platform]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        said = [rank.communicate(timeout=10 * SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode in (2, 3) for rank in ranks), said
    assert all("Traceback" not in text for text in said), said
    assert any("foreign rank" in text or "got no answer" in text for text in said), said
    assert any("rank 1" in text or "rank 0" in text for text in said), said
