"""Paced links of the testbed: in time, in order, shared by the chips of a node, cut and mended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hetero_megatron.comm.pacing import Pacer
from tests.pool import shared_pool


class Done:
    """What was sent at once."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


def test_paced_messages_queue_up_behind_each_other() -> None:
    pacer = Pacer(lambda: {1: 1e6, 2: None}, {1: 0.005})  # type: ignore[dict-item]
    assert pacer.submit({2: 100}, Done) is None
    begin = time.perf_counter()
    at: list[float] = []

    def start() -> Done:
        at.append(time.perf_counter() - begin)
        return Done()

    works = [pacer.submit({1: 20_000}, start) for _ in range(3)]
    assert all(w is not None and not w.is_completed() for w in works)
    for work in works:
        assert work is not None
        work.wait()
    for i, seconds in enumerate(at):
        assert seconds >= 0.02 * (i + 1) + 0.005
    assert at[2] < 0.02 * 3 + 0.005 + 0.1


PACED = """
import sys, time
from pathlib import Path
from hetero_megatron.comm.emulation import Emulation
rank, node_of = int(sys.argv[1]), [0, 0, 1, 2]
rates = [[None if a == b else 1e6 if 2 in (a, b) else 2e6 for b in range(4)] for a in range(4)]
described = {"links": "paced", "speeds": [None] * 4, "node_of": node_of, "pace": {"bandwidth": rates}}
pacer = Emulation(rank, described, Path(sys.argv[2])).pacer
class Done:
    def wait(self): pass
def seconds(*sizes):
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    for work in [pacer.submit({peer: size}, Done) for peer, size in sizes]:
        work.wait()
    print(start, time.perf_counter(), flush=True)  # which all processes count alike
seconds((2, 200_000))
seconds((2, 100_000), (3, 200_000))
seconds((1 - rank, 400_000))
"""


def test_chips_of_a_node_share_its_links_and_its_card(tmp_path: Path) -> None:
    """By the rates: two chips send at once, to one node at 1 MB/s, then to two at 1 and 2 MB/s, then to each other."""
    run = [sys.executable, "-c", PACED]
    pipe = subprocess.PIPE
    chips = [subprocess.Popen([*run, str(r), tmp_path], stdin=pipe, stdout=pipe, text=True) for r in range(2)]
    found = []
    for _ in range(3):
        for chip in chips:
            assert chip.stdout is not None and chip.stdout.readline() == "ready\n"
        for chip in chips:
            assert chip.stdin is not None
            chip.stdin.write("\n")
            chip.stdin.flush()
        said = [chip.stdout.readline().split() for chip in chips if chip.stdout is not None]
        found.append(max(float(end) for _, end in said) - min(float(start) for start, _ in said))
    for chip in chips:
        chip.communicate()
    # the link: 2 x 0.2 MB; the card, at 2 MB/s: 2 x 0.3 MB; inside a node everybody has his own way: 0.4 MB at 2 MB/s
    for seconds, wanted in zip(found, (0.4, 0.3, 0.2), strict=True):
        assert wanted * 0.95 <= seconds < wanted + 0.5


def _paced_all_to_all(comm, rates):  # type: ignore[no-untyped-def]
    """Every rank sends 4 messages and takes part in an all-to-all under a pacer; values arrive in order."""
    group_ranks = (0, 1, 2)
    comm.create_groups([group_ranks])
    if comm.rank not in group_ranks:
        return None
    comm.emulation.pacer = Pacer(lambda: {r: rates for r in group_ranks if r != comm.rank}, {})
    try:
        group = comm.group(group_ranks)
        results = []
        handles = []
        for round_ in range(3):
            send = torch.full((300,), float(10 * comm.rank + round_), dtype=torch.float64)
            handles.append(group.all_to_all(send, [100] * 3, [100] * 3))
        results = [h.wait().view(3, 100)[:, 0].tolist() for h in handles]
        vectors = group.gather_vectors(torch.tensor([float(comm.rank)])).flatten().tolist()
    finally:
        comm.emulation.pacer = None
    return results, vectors


def test_paced_collectives_keep_their_order() -> None:
    answers = shared_pool().run(_paced_all_to_all, 1e6)
    for answer in answers[:3]:
        results, vectors = answer
        assert results == [[0.0 + i, 10.0 + i, 20.0 + i] for i in range(3)]
        assert vectors == [0.0, 1.0, 2.0]


def test_a_cut_link_carries_nothing_and_keeps_the_order_when_mended() -> None:
    rates, begun = {1: 0.0, 2: 1e6}, []  # type: dict[int, float], list[str]
    pacer = Pacer(lambda: rates, {}, timeout=0.5)

    def start(name: str):  # type: ignore[no-untyped-def]
        return lambda: begun.append(name) or Done()

    first = pacer.submit({1: 100}, start("to 1"))
    both = pacer.submit({1: 100, 2: 100}, start("group"), (0, 1, 2))
    later = pacer.submit({2: 100}, start("group again"), (0, 1, 2))
    free = pacer.submit({3: 100, 2: 0}, start("free"))
    assert free is None  # nothing on the way there is paced
    assert first is not None and both is not None and later is not None
    with pytest.raises(RuntimeError, match="carries nothing"):
        first.wait()
    assert begun == [] and not later.is_completed()
    rates[1] = 1e6
    for work in (first, both, later):
        work.wait()
    assert begun == ["to 1", "group", "group again"]
