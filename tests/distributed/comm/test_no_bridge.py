"""Without the bridge unlike libraries cannot be joined by mistake: the job refuses or ends within the time-out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.comm.test_island_faults import PIPELINE, start
from tests.support.ports import free_port
from tests.support.vendors import build_emulated

# The planted defect: every pair of ranks counts as joined by the library of whoever asks.
WRONG = (
    "import sys; import hetero_megatron.comm.islands as i; "
    "i.Islands.route = lambda self, ranks: i.Route(library=self.endpoints[next(iter(ranks))].library); "
    "from hetero_megatron.cli.start import train; train('pretrain', sys.argv[1:])"
)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # building the device takes minutes
@pytest.mark.parametrize(
    "others",
    [
        pytest.param(("emulated_vendor", "other"), id="another vendor"),
        pytest.param(("cpu", ""), id="the host"),
    ],
)
def test_a_route_by_the_wrong_library_ends_the_job_in_time(others: tuple[str, str], tmp_path: Path) -> None:
    build_emulated()
    plan, port = tmp_path / "plan.yaml", free_port()
    plan.write_text(PIPELINE)
    program = ["-c", WRONG, "--model", "tiny", "--mock-data", "--train-iters", "2", "--lr", "1e-3", "--plan"]
    chips = (("emulated_vendor", "one"), others)
    ranks = [start(r, platform, port, plan, program, vendor) for r, (platform, vendor) in enumerate(chips)]
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode in (2, 3) for rank in ranks), said
    assert all("Traceback" not in text for text in said), said
    assert any("foreign rank" in text or "got no answer" in text for text in said), said
    assert any("rank 1" in text or "rank 0" in text for text in said), said
