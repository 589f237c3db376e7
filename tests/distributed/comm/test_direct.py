"""A backend that reaches several vendors, which another plugin brings: FlagCX, with a stand-in for its torch plugin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.comm import Comm
from hetero_megatron.errors import UserError
from hetero_megatron.platform.direct import DirectBackend
from hetero_megatron.platform.plugins import load_plugins
from tests.support.parity import check_case, fixed_case, random_case, run_rank
from tests.support.pool import Pool, shared_pool
from tests.support.small_plans import LLAMA, pipe, plan, stage

RANKS = ("reaching:a", "reaching:b", "reaching:a", "reaching:b")
SEED = 1042  # of four ranks, with stages and replicas in both vendors
CROSSING = plan([
    pipe(1, 4, stage([0], [0, 1]), stage([1], [1, 3])), pipe(2, 1, stage([3], [0, 2]), stage([2], [2, 3])),
])  # fmt: skip


def seen(comm: Comm, *arguments: Any) -> dict[str, Any]:
    """What ``run_rank`` returns, with the rank's routes and the groups that the stand-in made."""
    import flagcx

    before = len(flagcx.made)
    assert comm.islands is not None
    found = run_rank(comm, *arguments)
    routes = [str(comm.islands.route((comm.rank, rank))) for rank in range(4)]
    return found | {"routes": routes, "made": len(flagcx.made), "new": len(flagcx.made) - before}


class Seeing:
    def __init__(self, pool: Pool) -> None:
        self.pool, self.seen = pool, list[dict[str, Any]]()

    def run(self, job: Any, *arguments: Any) -> list[dict[str, Any]]:
        assert job is run_rank
        self.seen = self.pool.run(seen, *arguments)
        return self.seen


def test_training_over_two_vendors_equals_one_process() -> None:
    """Messages between stages, and sums of gradients between replicas, cross by it; inside a vendor nothing does."""
    seeing = Seeing(shared_pool(RANKS))
    check_case(fixed_case(LLAMA | {"tie_word_embeddings": True}, CROSSING), seeing)
    for rank, one in enumerate(seeing.seen):
        assert one["routes"] == ["wccl" if (rank + other) % 2 == 0 else "flagcx, direct" for other in range(4)]
        assert one["made"] >= 3 and one["new"] >= 1, "two ways of messages, and groups of gradients"
    check_case(random_case(SEED), seeing)


def test_vendors_whose_devices_it_knows_reach_each_other_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Path(__file__).parents[2] / "support" / "flagcx_stub"
    found = load_plugins().platforms
    assert all(a.reaches() == () for a in found.values()), "it is not installed here"
    monkeypatch.syspath_prepend(str(stub))
    reach = {name for name, a in load_plugins().platforms.items() if a.reaches() == ("flagcx",)}
    assert reach == {
        "nvidia", "amd", "ascend", "cambricon", "mthreads", "metax", "iluvatar", "hygon", "kunlunxin", "tsingmicro",
    }  # fmt: skip
    assert "flagcx" not in sys.modules, "it changes torch: not before it is needed"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise OSError('libflagcx.so: cannot open')", "raised OSError: libflagcx.so: cannot open"),
        ("", "registers no backend of this name"),
    ],
)
def test_one_that_cannot_be_used_is_refused_by_name(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_direct.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_direct", raising=False)
    backend = DirectBackend("brokencx", "broken_direct", ("cpu",))
    assert backend.installed() and not DirectBackend("x", "nothing_like_this", ()).installed()
    with pytest.raises(UserError) as refused:
        backend.load()
    assert said in str(refused.value) and "--transport bridge" in str(refused.value)
