"""Elastic runs on emulated devices, whose library connects ranks: as on processors, nothing changes a bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.distributed.training import test_elastic_islands as islands
from tests.distributed.training.test_elastic import PLANS, check, run
from tests.support.elastic_jobs import Devices, Happening, Host
from tests.support.paths import ROOT
from tests.support.selection import quick
from tests.support.vendors import PLUGINS

pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.timeout(1800)]  # building takes minutes

PLUGIN = {
    "HETERO_PLUGINS": "hetero_emulated_vendor.plugin",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(PLUGINS / "emulated_vendor")]),
}
SILENT = "silent-abort,blocking-groups,lazy-loading"


def emulated(count: int, habits: str = "", processors: int = 0) -> Devices:
    """So many emulated devices, and processors behind them."""
    devices = [(("--platform", "emulated_vendor"), {**PLUGIN, "HETERO_EMULATED_HABITS": habits})] * count
    return [*devices, *[(("--platform", "cpu"), PLUGIN)] * processors]


# No TP group is of a device and a processor, which is the last rank.
PLANS_OF_BOTH = {**PLANS, 3: """
  - {micro_batch_size: 1, num_micro_batches: 4, stages: [{ranks: [0, 1], layers: [0, 4], tp: 2},
     {ranks: 2, layers: [4, 6]}]}
"""}
# Name -> (happenings to four ranks, habits of the device, of the ranks that are processors). Ranks 0 and 1 are a
# pipeline's first stage, 2 its second, 3 is another pipeline.
CASES = {
    "a receive waits on the device": ([Happening(2, "message", 4)], "", 0),
    "a receive waits, and its abort says nothing": ([Happening(2, "message", 4)], SILENT, 0),
    "in the sum of gradients": ([Happening(1, "reduce", 4)], SILENT, 0),
    "in the update, and one leaves": ([Happening(3, "update", 3), Happening(0, "step", 6, "leave")], "", 0),
    "while state moves": ([Happening(3, "step", 3), Happening(1, "move", 1)], "", 0),
    "while groups are made": ([Happening(3, "step", 3), Happening(1, "join", 1)], "blocking-groups", 0),
    "beside processors": ([Happening(1, "reduce", 4)], SILENT, 1),
    "a processor, and a receive": ([Happening(3, "step", 3), Happening(1, "message", 6)], "", 1),
}
EVERY_TIME = ["a receive waits, and its abort says nothing"]  # in CI; of the others, processors' tests have each


@pytest.mark.parametrize("name", quick(CASES, [], EVERY_TIME))
def test_whatever_happens_on_devices(name: str, tmp_path: Path) -> None:
    happenings, habits, processors = CASES[name]
    plans = {"plans_by_count": PLANS_OF_BOTH if processors else PLANS}
    found = run(tmp_path, 4, happenings, devices=emulated(4 - processors, habits, processors), **plans)
    stay = 0 if any(one.member == 3 for one in happenings) else processors
    by_count = {count: emulated(count - stay, habits, stay) for count in (2, 3)}
    by_count[4] = emulated(4 - processors, habits, processors)
    check(tmp_path, 4, found, devices_by_count=by_count, **plans)
    assert found.epochs and all("from memory" in text for text, _ in found.epochs), found.output


@pytest.mark.exhaustive
def test_a_host_with_devices_joins_and_leaves(tmp_path: Path) -> None:
    """Two ranks, four after the third step or so, and two again after the sixth."""
    words, environment = emulated(1, "blocking-groups")[0]
    leaves = (Happening(0, "step", 6, "leave"),)
    late = Host("late", 1, 2, leaves, tuple(words), tuple(environment.items()))
    found = run(tmp_path, 2, [Happening(0, "step", 3, "wait")], hosts=[late], devices=emulated(2, "blocking-groups"))
    assert len(found.epochs) == 2 and "late joined (2 ranks); 4 ranks went on" in found.epochs[0][0], found.output
    by_count = {count: emulated(count, "blocking-groups") for count in (2, 4)}
    assert check(tmp_path, 2, found, devices_by_count=by_count)[1] == 7, found.output


@pytest.mark.slow
@pytest.mark.parametrize("when", quick([("step", 5), ("exchange", 6)], [], [("exchange", 6)]))
def test_an_island_of_devices_is_lost(when: tuple[str, int], tmp_path: Path) -> None:
    """Also where the abort of an exchange says nothing, so that what came would be added as if it were complete."""
    found = islands.run(tmp_path, islands.FIRST_OF_TWO, [Happening(2, *when)], devices=emulated(3, SILENT))
    (text, step), = found.epochs
    assert "from memory" in text and "island 1 is left out" in text and step in (5, 6), found.output
    assert found.steps[-1]["loss"] < found.steps[4]["loss"]
    if when[0] == "step":
        plans = [(islands.FIRST_OF_TWO, 3, 5), (islands.WITHOUT_LAST, 2, islands.STEPS)]
        islands.check(tmp_path, found, plans, {count: emulated(count, SILENT) for count in (2, 3)})


# Name -> (what happens, flags, grace)
FURTHER = {
    "layers are graphs": (
        Happening(1, "reduce", 5), ("--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "1"), 30.0
    ),
    "a peer hangs": (Happening(1, "step", 4, "freeze"), ("--distributed-timeout-minutes", "0.1"), 3.0),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FURTHER)
def test_whatever_the_devices_do(name: str, tmp_path: Path) -> None:
    happening, flags, grace = FURTHER[name]
    devices = {count: emulated(count, "silent-abort") for count in (2, 3, 4)}
    more = ("--peer-replicas-every", "1", *flags)
    found = run(tmp_path, 4, [happening], *more, grace=grace, devices=devices[4])
    check(tmp_path, 4, found, *flags, devices_by_count=devices)
    assert len(found.epochs) == 1 and "from memory" in found.epochs[0][0], found.output
