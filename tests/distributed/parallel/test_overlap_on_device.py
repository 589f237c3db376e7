"""Gradients travel during backward though nobody asks whether they have come: a device's library, and a silent peer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero_megatron.comm import Comm, Group
from hetero_megatron.comm.hooks import Hooks, TorchWork
from hetero_megatron.data.batch import Batch
from hetero_megatron.model import initial_values
from hetero_megatron.parallel.collectives import gather_tokens, scatter_tokens
from hetero_megatron.parallel.optimizer import SGD
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.buckets import IN_FLIGHT
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.rank_platform import plan_for
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from tests.support.parity import check_case, fixed_case
from tests.support.pool import Pool
from tests.support.vendors import with_attention

MODEL = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
BUCKETS = 6
PLANS = {
    "equal": [[{"ranks": [0], "layers": [0, 2]}], [{"ranks": [1], "layers": [0, 2]}]],  # summed up where they are
    "unlike": [  # packed, and summed up in new memory
        [{"ranks": [0], "layers": [0, 2]}], [{"ranks": [1, 2], "layers": [0, 2], "tp": 2}],
    ],
}  # fmt: skip

EMULATED_RANKS = 3
pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.timeout(1800)]  # building takes minutes


class Unfinished:
    """A work that is complete when it has been waited for, and not before."""

    def __init__(self, work: TorchWork) -> None:
        self.work = work

    def is_completed(self) -> bool:
        return False

    def wait(self) -> object:
        return self.work.wait()


def plan_of(name: str) -> dict[str, Any]:
    pipelines = [{"micro_batch_size": 1, "num_micro_batches": 2, "stages": stages} for stages in PLANS[name]]
    return {"version": 1, "seq_length": 8, "global_batch_size": 4, "pipelines": pipelines}


def starts_of(comm: Comm, name: str, key: str, tied: bool, chunked: bool) -> tuple[list[str], int]:
    """(activities, buckets): what rank 0 was doing when each bucket's exchange started; the others begin when as many
    have as there is memory for. (Then its compute stream waits, and on this device with it the host.)"""
    spec = from_hf_config(MODEL | {"tie_word_embeddings": tied})
    plan = with_attention(plan_for(plan_from_dict(plan_of(name), spec), comm.islands), comm.device)
    compiled = CompiledPlan(plan, spec, bucket_bytes=16 << 10)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return [], 0
    store = dist.distributed_c10d._get_default_store()
    holders, started = plan.ranks, list[str]()

    def submit(start: Callable[[], TorchWork | None], sizes: Any, group: tuple[int, ...]) -> TorchWork | None:
        work = start()
        if group == holders and "action" in comm.activity:
            started.append(comm.activity)
            if comm.rank == 0 and len(started) == IN_FLIGHT + 1:
                store.set(key, "all")
        return None if work is None else Unfinished(work)

    tokens = torch.arange(32).view(4, 8) % 61

    def rows(indices: Any) -> Batch:
        return Batch(tokens[list(indices)], tokens[list(indices)], torch.arange(8).expand(len(indices), 8))

    def fetch(indices: Any) -> Batch:
        if comm.rank:
            store.wait([key])
        return rows(indices)

    runtime = Runtime(
        compiled, comm, torch.float32, lambda t, box: initial_values(t, box, spec, 0), lambda g: SGD(g, 0.0),
        options=RuntimeOptions(logits_bytes=1000 if chunked else 1 << 30),
    )  # fmt: skip
    runtime.warm_up(rows, 0, plan.global_batch_size)  # in which no rank waits for another's buckets
    before, comm.hooks = comm.hooks, Hooks(comm.clock, submit)
    try:
        memory = []
        for step in range(2):
            runtime.train_step(fetch, 0, plan.global_batch_size, 1e-3)
            memory.append({i: flat.memory.data_ptr() for i, flat in runtime.sync.sums.allocated.items()})
            if not step:
                first, started = started, []
    finally:
        comm.hooks = before
    assert memory[0] == memory[1]  # buckets are allocated once
    buckets = len(compiled.buckets)
    assert len(memory[0]) == (buckets if name == "equal" else 0)
    return first, buckets


@pytest.mark.parametrize(
    ("name", "tied", "chunked"),
    [("equal", False, False), ("unlike", False, False), ("equal", False, True), ("unlike", True, True)],
)
def test_every_bucket_starts_during_backward(name: str, tied: bool, chunked: bool, pool: Pool) -> None:
    """``chunked``: the head's gradient comes in forward; of tied embeddings another part in backward."""
    started, buckets = pool.run(starts_of, name, f"started/{name}/{tied}/{chunked}", tied, chunked)[0]
    assert len(started) == buckets and (tied or buckets == BUCKETS)
    assert all("action B" in activity for activity in started), started


@pytest.mark.parametrize("name", PLANS)
def test_sums_are_those_of_one_process(name: str, pool: Pool) -> None:
    check_case(fixed_case(MODEL, plan_of(name), dtype="fp64"), pool)


def collectives_of(
    comm: Comm, fixed_order: bool, ahead: bool
) -> tuple[dict[str, int], list[float], list[torch.Tensor]]:
    """(calls of each of the library's collectives, losses, weights) of rank 0, 1 or 2 of three equal replicas."""
    spec = from_hf_config(MODEL | {"hidden_size": 192, "intermediate_size": 192, "vocab_size": 120})
    pipelines = [
        {"micro_batch_size": 1, "num_micro_batches": 1, "stages": [{"ranks": [r], "layers": [0, 2]}]} for r in range(3)
    ]
    described = {"version": 1, "seq_length": 8, "global_batch_size": 3, "pipelines": pipelines}
    plan = with_attention(plan_for(plan_from_dict(described, spec), comm.islands), comm.device)
    compiled = CompiledPlan(plan, spec, bucket_bytes=64 << 10)
    comm.create_groups(compiled.groups)
    tokens = torch.arange(24).view(3, 8)

    def fetch(indices: Any) -> Batch:
        return Batch(tokens[list(indices)], tokens[list(indices)], torch.arange(8).expand(len(indices), 8))

    calls, kept = {"reduce_scatter": 0, "all_gather": 0}, {}
    for name in calls:
        kept[name] = getattr(Group, name)

        def counted(self: Group, *tensors: torch.Tensor, name: str = name) -> Any:
            calls[name] += 1
            return kept[name](self, *tensors)

        setattr(Group, name, counted)
    try:
        runtime = Runtime(
            compiled, comm, torch.float32, lambda t, box: initial_values(t, box, spec, 0), lambda g: SGD(g, 0.0),
            options=RuntimeOptions(fixed_order=fixed_order),
        )  # fmt: skip
        losses = [runtime.train_step(fetch, 0, 3, 1e-2, step=i + 1, ahead=ahead and i < 2).loss for i in range(3)]
    finally:
        for name, method in kept.items():
            setattr(Group, name, method)
    return calls, losses, [p.detach().cpu() for p in runtime.sync.params.values()]


def test_the_library_sums_and_gathers_equal_parts(pool: Pool) -> None:
    """But in the order of ranks where that is asked for; beside the next forward parameters have the same bits."""
    by_library = pool.run(collectives_of, False, True)
    assert by_library[0][0]["reduce_scatter"] > 0 and by_library[0][0]["all_gather"] > 0
    fixed, waiting = pool.run(collectives_of, True, True), pool.run(collectives_of, True, False)
    assert not fixed[0][0]["reduce_scatter"] and fixed[0][0]["all_gather"] == by_library[0][0]["all_gather"]
    for rank in range(EMULATED_RANKS):
        assert fixed[rank][1] == waiting[rank][1] == pytest.approx(by_library[rank][1], rel=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(fixed[rank][2], waiting[rank][2], strict=True))
        torch.testing.assert_close(by_library[rank][2], fixed[rank][2], rtol=1e-5, atol=1e-6)


def tp_sums(comm: Comm) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(sums of three ranks' values in bf16 as they are by default, and by the library, collectives of the latter)."""
    comm.create_groups([(0, 1, 2)])
    group, counted = comm.group((0, 1, 2)), list[str]()
    values = torch.tensor([1.0, 2.0**-8, 2.0**-8][comm.rank], dtype=torch.bfloat16).expand(1, 6, 4).to(comm.device)
    wide = scatter_tokens(values, group, (2, 2, 2))
    reduce_scatter = Group.reduce_scatter
    Group.reduce_scatter = lambda *a: counted.append("") or reduce_scatter(*a)  # type: ignore[method-assign,func-returns-value]
    try:
        narrow = scatter_tokens(values, replace(group, narrow_sums=True), (2, 2, 2))
        scatter_tokens(values, replace(group, narrow_sums=True), (3, 2, 1))
    finally:
        Group.reduce_scatter = reduce_scatter  # type: ignore[method-assign]
    return wide.cpu(), narrow.cpu(), len(counted)


def test_sums_of_tensor_parallelism_are_rounded_once_or_by_the_library(pool: Pool) -> None:
    for wide, narrow, collectives in pool.run(tp_sums):
        assert torch.equal(wide, torch.full((1, 2, 4), 1 + 2.0**-7, dtype=torch.bfloat16))
        assert collectives == 1, "of equal shares alone"
        assert torch.equal(narrow, torch.ones_like(narrow)) or torch.equal(narrow, wide), "by the library's order"


def memory_that_works_keep(comm: Comm) -> int:
    """MiB that are held by works which somebody keeps, as the watch does, of what autograd had to keep as well."""
    comm.create_groups([(0, 1, 2)])
    group, emu, kept = comm.group((0, 1, 2)), torch.emu, list[object]()  # type: ignore[attr-defined]
    watch, shards = comm.watch, (2, 2, 2)
    emu.synchronize()
    before = emu.memory_allocated()
    comm.watch = SimpleNamespace(add=lambda work, *more: kept.append(work))  # type: ignore[assignment]
    try:
        x, factor = (torch.ones(1, 6, 1 << 18, device=comm.device) for _ in range(2))  # 6 MiB each
        gathered = gather_tokens(scatter_tokens(x.requires_grad_() * factor, group, shards), group, shards)
        assert gathered.grad_fn is not None and len(kept) == 2
        del x, factor, gathered
    finally:
        comm.watch = watch
    gc.collect()
    emu.synchronize()
    return (emu.memory_allocated() - before) >> 20  # type: ignore[no-any-return]


def test_works_keep_what_they_write_and_nothing_of_autograds(pool: Pool) -> None:
    """Else the graph of a step before is alive, beside which nothing can be captured, while the watch has its works."""
    assert max(pool.run(memory_that_works_keep)) <= 2 + 6
