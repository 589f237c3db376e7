"""Bad habits of real devices, on an emulated device that has them: what would hang, crawl or be refused there.

``docs/results/devices.md`` says what each test showed before the runtime was mended.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.pipeline.executor import PipelineExecutor
from hetero_megatron.pipeline.stage_work import StepResult
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.training.runtime import Runtime
from tests.support.parity import Case, check_case, fixed_case, random_case, reference, run_rank
from tests.support.pool import PRELOAD, Pool, shared_pool
from tests.support.ports import free_port
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.timeout(1800)]  # building takes minutes

TWO_STAGES = plan([pipe(1, 4, stage([0], [0, 1]), stage([1], [1, 3]))])
SPLIT = [{"ranks": [0, 1], "tokens": [10, 6], "heads": [4, 2]}]
DOCUMENTS = plan([pipe(1, 4, stage([0, 1], [0, 2], context=SPLIT, order="contiguous"), stage([2], [2, 3]))], 16)
TWO_REPLICAS = plan([pipe(1, 2, stage([0], [0, 3])), pipe(1, 2, stage([1], [0, 3]))])
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
# As many slots as an H100 has multiprocessors: a receive between unlike meshes is several messages.
ALL = "lazy-loading,blocking-groups,slots=132,communicator-mib=8,freeing-waits"


def pool_of(habits: str, ranks: int = 2) -> Pool:
    return shared_pool((f"emulated:{habits}",) * ranks)


WAITS = "one rank compiles longer than others wait to connect"
# The habits, a plan that meets them, and the dtype.
CASES: dict[str, tuple[str, Case]] = {
    "kernels are loaded when they are first used": ("lazy-loading", fixed_case(LLAMA, TWO_STAGES)),
    "waiting receives occupy slots": ("slots=8", fixed_case(LLAMA, TWO_STAGES)),
    "the first collective of a group blocks the host": (
        "blocking-groups", fixed_case(LLAMA | {"tie_word_embeddings": True}, TWO_STAGES)
    ),
    "no double precision": ("no-fp64", fixed_case(LLAMA, TWO_STAGES, dtype="fp32")),
    "sizes follow the data: tokens of each expert": ("lazy-loading", fixed_case(MIXTRAL, TWO_STAGES)),
    "sizes follow the data: documents": ("lazy-loading", fixed_case(LLAMA, DOCUMENTS, packed=True)),
    WAITS: (
        "blocking-groups,connect=3,compile=6", fixed_case(LLAMA, TWO_REPLICAS)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x == WAITS else ()) for x in CASES])
def test_training_equals_one_process(name: str) -> None:
    habits, case = CASES[name]
    check_case(case, pool_of(habits, 3 if case.plan is DOCUMENTS else 2))


SEEDS = [int(os.environ.get("SEED", "50")) + i for i in range(int(os.environ.get("N", "8")))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick(SEEDS, [], SEEDS[:3]))
def test_random_plans_equal_one_process_with_all_habits(seed: int) -> None:
    check_case(random_case(seed), pool_of(ALL, 8))


def loaded_by(comm: Comm, batches: Sequence[int], *arguments: Any) -> list[list[str]]:
    """Kernels that were first used while the actions of each step ran, where messages may wait."""
    loaded, known = torch.emu.loaded_kernels, list[list[str]]()  # type: ignore[attr-defined]
    run, step = PipelineExecutor.run, Runtime.train_step

    def counting(self: PipelineExecutor, *given: Any) -> StepResult:
        before = len(loaded())
        result = run(self, *given)
        known.append(loaded()[before:])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineExecutor, "run", counting)
        sizes = iter(batches)
        patch.setattr(
            Runtime, "train_step",
            lambda self, fetch, first, _, *rest, **more: step(self, fetch, first, next(sizes), *rest, **more),
        )
        run_rank(comm, *arguments)
    return known


def test_nothing_is_first_used_beside_messages_when_micro_batches_change_their_size() -> None:
    """A batch that grows, or that does not divide: kernels are chosen by sizes."""
    odd = plan([pipe(2, 4, stage([0], [0, 1]), stage([1], [1, 3]))], 13)  # a length of its own: the pool is shared
    case = fixed_case(LLAMA, odd)
    outcome, spec, initial = reference(case, torch.float64)
    assert outcome
    arrays = {name: tensor.numpy() for name, tensor in initial.items()}
    ranks = pool_of("lazy-loading").run(loaded_by, (8, 7), case, plan_from_dict(odd, spec), spec, arrays)
    assert ranks == [[[], []]] * 2


def communicators_of(comm: Comm, *arguments: Any) -> int:
    """Of pairs: those of groups are left out."""

    def pairs() -> int:
        groups = sum(len(made) for ranks, made in comm._groups.items() if comm.rank in ranks and len(ranks) > 1)
        return int(torch.emu.communicators()) - groups  # type: ignore[attr-defined]

    before = pairs()
    run_rank(comm, *arguments)
    return pairs() - before


class Counting:
    """A pool that counts the communicators of a case."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.counts = pool, list[int]()

    def run(self, job: Any, *arguments: Any) -> Any:
        assert job is run_rank
        self.counts = self.pool.run(communicators_of, *arguments)
        return [{}] * len(self.counts)


def test_only_ranks_that_exchange_have_communicators() -> None:
    """TP 2 beside TP 2: half of the tokens each, so that each rank has one neighbour, two ways."""
    from tests.support.parity import run_case

    counting = Counting(pool_of("communicator-mib=1", 4))
    stages = stage([0, 1], [0, 1], tp=2), stage([2, 3], [1, 3], tp=2)
    run_case(fixed_case(LLAMA, plan([pipe(1, 2, *stages)])), counting)
    assert counting.counts == [2] * 4


def _join(rank: int, port: int, job: str, pipe: Connection) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "HETERO_EMULATED_MEMORY_MIB": "64", "HETERO_EMULATED_VERSION": f"2.{rank}" if job == "unlike" else "2.0",
    }  # fmt: skip
    from hetero_megatron.comm import start_comm
    from tests.support.vendors import platform

    def lost(error: Exception) -> None:
        pipe.send(str(error))
        os._exit(0)

    try:
        # The other one waits for rank 0: it must not be gone when rank 0 says why it waits.
        comm = start_comm(platform("emulated:freeing-waits", rank), 5.0 if rank == 0 else 60.0, lost=lost)
    except Exception as error:
        return lost(error)
    comm.connect([1 - rank])
    theirs = comm.irecv(torch.zeros(4, device=comm.device), 1 - rank, 0)
    kept = [torch.zeros(1 << 18, device=comm.device) for _ in range(100 if rank == 0 else 1)]  # 1 MiB each
    mine = torch.zeros(4, device=comm.device) if rank == 0 else theirs.wait()
    assert kept and mine is not None
    comm.isend(mine, 1 - rank, 0).wait()
    comm.accelerator.synchronize()  # type: ignore[union-attr]


def said_by_rank_0(job: str) -> str:
    """What ends rank 0 of two."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port, pipes, ranks = free_port(), [], []
    for rank in range(2):
        mine, theirs = context.Pipe(duplex=False)
        ranks.append(context.Process(target=_join, args=(rank, port, job, theirs), daemon=True))
        ranks[-1].start()
        pipes.append(mine)
    try:
        assert wait([pipes[0]], 120), "rank 0 still waits"
        return str(pipes[0].recv())
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.slow
def test_a_rank_that_waits_for_memory_beside_a_receive_says_so() -> None:
    """The device gives memory back when all that was started has ended, and the receive never does."""
    said = said_by_rank_0("full")
    assert "perhaps it waits for memory" in said and "of 64 MiB left" in said, said


def test_unlike_versions_of_the_library_are_named() -> None:
    said = said_by_rank_0("unlike")
    assert "unlike versions of emuccl: 2.0 on ranks 0, 2.1 on ranks 1" in said, said
