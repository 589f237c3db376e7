"""Messages where transfers of a pair queue up and tags are not looked at, as on NVIDIA's NCCL: one tag for all, so that
a message in another order than its receive would be taken for another one."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_megatron.comm import Comm
from tests.support.parity import check_case, fixed_case, random_case, run_rank
from tests.support.pool import RANKS, Pool, shared_pool
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage


def untagged(comm: Comm, *arguments: Any) -> Any:
    comm.isend = lambda tensor, dst, tag: Comm.isend(comm, tensor, dst, 0)  # type: ignore[method-assign]
    comm.irecv = lambda tensor, src, tag: Comm.irecv(comm, tensor, src, 0)  # type: ignore[method-assign]
    try:
        return run_rank(comm, *arguments)
    finally:
        del comm.isend, comm.irecv


class UntaggedPool:
    """For jobs whose messages have no tags, in one island of a library, which has a way up and one down."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def run(self, job: Any, *arguments: Any) -> Any:
        assert job is run_rank
        return self.pool.run(untagged, *arguments)


@pytest.mark.parametrize("seed", quick(range(6), [1], [4]))
def test_messages_need_no_tags_where_each_way_keeps_their_order(seed: int) -> None:
    check_case(random_case(1000 + seed), UntaggedPool(shared_pool(("walled",) * RANKS)))


@pytest.mark.parametrize("chunks", [2, 3])
def test_activations_and_gradients_of_two_stages_with_chunks_keep_their_order(chunks: int) -> None:
    """One way between the two go activations of some chunks and gradients of others."""
    layers = [[[2 * c + s, 2 * c + s + 1] for c in range(chunks)] for s in range(2)]
    stages = [stage([0], layers[0]), stage([2, 1], layers[1], tp=2)]
    case = fixed_case(
        LLAMA | {"num_hidden_layers": 2 * chunks}, plan([pipe(1, 5, *stages)], schedule="interleaved")
    )
    check_case(case, UntaggedPool(shared_pool(("walled",) * RANKS)))
