"""``hetero-megatron comm check``: what is wrong between two ranks is found and named."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from hetero_megatron.cli.comm import main
from hetero_megatron.comm import Comm, Work
from hetero_megatron.comm.check import check_groups, check_pairs, measure, rounds
from hetero_megatron.errors import UserError
from tests.support.pool import RANKS, shared_pool

MIXED = ("cpu", "walled", "walled", "cpu", "walled", "cpu", "cpu", "walled")
GROUPS = [tuple(range(RANKS)), (0, 3), (1, 2, 4), (1, 3), (2, 5, 6, 7)]


@pytest.mark.parametrize("ranks", range(1, 12))
def test_rounds_are_all_pairs_and_disjoint(ranks: int) -> None:
    found = rounds(ranks)
    assert sorted(pair for one in found for pair in one) == sorted(combinations(range(ranks), 2))
    assert all(len({r for pair in one for r in pair}) == 2 * len(one) for one in found)


def check(comm: Comm, damage: tuple[int, int] | None, which: str) -> list[Any]:
    """What this rank finds, with a byte changed on the way of one pair's messages."""
    comm.create_groups(GROUPS)
    send = Comm.isend

    def damaged(tensor: torch.Tensor, dst: int, tag: int) -> Work:
        if (comm.rank, dst) == damage and tensor.numel() > 100:
            tensor = tensor.clone()
            tensor[77] ^= 1
        return send(comm, tensor, dst, tag)

    comm.isend = damaged  # type: ignore[method-assign]
    try:
        if which == "groups":
            return [str(f) for f in check_groups(comm, GROUPS, 20_000)]
        if which == "speeds":
            return [(s.source, s.target, s.route) for s in measure(comm, comm.group(GROUPS[0]), [(0, 1), (2, 4)], 9999)]
        return [(f.source, f.target, f.what) for f in check_pairs(comm, RANKS, 5000)]
    finally:
        del comm.isend


def test_sound_ranks_have_no_faults() -> None:
    pool = shared_pool(MIXED)
    assert pool.run(check, None, "pairs") == [[]] * RANKS
    assert pool.run(check, None, "groups") == [[]] * RANKS


@pytest.mark.parametrize("pair", [(0, 1), (5, 3), (7, 2)])
def test_a_changed_byte_is_found_and_its_pair_named(pair: tuple[int, int]) -> None:
    found = sum(shared_pool(MIXED).run(check, pair, "pairs"), [])
    assert found == [(*pair, "1 of 5,000 bytes are wrong, the first is number 77")]


def test_routes_are_told_with_the_speeds() -> None:
    found = sum(shared_pool(MIXED).run(check, None, "speeds"), [])
    assert [(a, b, route.split()[0]) for a, b, route in found] == [(0, 1, "bridge"), (2, 4, "wccl")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["test"], "check"),
        (["check", "--bytes", "0"], "--bytes"),
        (["check", "--timeout", "nan"], "--timeout"),
        (["check", "--plan", "x.yaml"], "--model"),
        (["check"], "nobody to reach"),
    ],
)
def test_refusals(words: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=says):
        main(words)
