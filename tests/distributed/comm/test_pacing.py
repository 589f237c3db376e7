"""Paced links of the testbed: in time, in order, shared by the chips of a node, cut and mended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from hetero_megatron.comm.hooks import Hooks
from hetero_megatron.emulation.pacing import NodeLanes, Pacer
from tests.support.pool import shared_pool


class Done:
    """What was sent at once."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


def test_paced_messages_queue_up_behind_each_other() -> None:
    pacer = Pacer(lambda: {1: 1e6, 2: None}, {1: 0.005})  # type: ignore[dict-item]
    assert isinstance(pacer.submit(Done, {2: 100}), Done), "not paced: begun at once"
    begin = time.perf_counter()
    at: list[float] = []

    def start() -> Done:
        at.append(time.perf_counter() - begin)
        return Done()

    works = [pacer.submit(start, {1: 20_000}) for _ in range(3)]
    assert all(w is not None and not w.is_completed() for w in works)
    for work in works:
        assert work is not None
        work.wait()
    for i, seconds in enumerate(at):
        assert seconds >= 0.02 * (i + 1) + 0.005


def test_chips_of_a_node_share_its_links_and_its_card(tmp_path: Path) -> None:
    """When messages are through, by the rates; each chip has opened the node's file by itself."""
    node_of, card = [0, 0, 1, 2], 2e6  # bytes/s

    def node(name: str) -> list[NodeLanes]:
        return [NodeLanes(tmp_path / name, 0, node_of, card) for _ in range(2)]

    one, other = node("link")  # both to rank 2 at 1 MB/s: one after the other
    assert [one.book(10.0, 2, 200_000, 0.2), other.book(10.0, 2, 200_000, 0.2)] == pytest.approx([10.2, 10.4])
    assert one.book(11.0, 2, 100_000, 0.1) == pytest.approx(11.1), "free again"
    one, other = node("card")  # to two nodes at 2 MB/s each: the card carries 2 MB/s in all
    assert [one.book(10.0, 2, 200_000, 0.1), other.book(10.0, 3, 200_000, 0.1)] == pytest.approx([10.1, 10.2])
    assert other.book(10.0, 0, 400_000, 0.2) == 10.0, "inside a node everybody has a way of their own"


def _paced_all_to_all(comm, rates):  # type: ignore[no-untyped-def]
    """Every rank sends 4 messages and takes part in an all-to-all under a pacer; values arrive in order."""
    group_ranks = (0, 1, 2)
    comm.create_groups([group_ranks])
    if comm.rank not in group_ranks:
        return None
    comm.hooks = Hooks(submit=Pacer(lambda: {r: rates for r in group_ranks if r != comm.rank}, {}).submit)
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
        comm.hooks = Hooks()
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

    first = pacer.submit(start("to 1"), {1: 100})
    both = pacer.submit(start("group"), {1: 100, 2: 100}, (0, 1, 2))
    later = pacer.submit(start("group again"), {2: 100}, (0, 1, 2))
    free = pacer.submit(start("free"), {3: 100, 2: 0})
    assert isinstance(free, Done) and begun == ["free"]  # nothing on the way there is paced
    begun.clear()
    assert first is not None and both is not None and later is not None
    with pytest.raises(RuntimeError, match="carries nothing"):
        first.wait()
    assert begun == [] and not later.is_completed()
    rates[1] = 1e6
    for work in (first, both, later):
        work.wait()
    assert begun == ["to 1", "group", "group again"]
