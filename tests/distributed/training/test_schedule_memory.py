"""What micro-batches in flight really take under each schedule: torch's CPU allocator against estimates and caps."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hetero_megatron.comm import Comm
from hetero_megatron.model import initial_values
from hetero_megatron.plans import Pipeline, Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.memory.micro_batches import micro_batch_bytes
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.schedule.actions import HOST_LOOKAHEAD, SEND_LAG
from hetero_megatron.schedule.adaptive import search_adaptive
from hetero_megatron.schedule.adaptive_chunks import search_adaptive_chunks
from hetero_megatron.schedule.chunk_times import ChunkedTimes
from hetero_megatron.schedule.stage_orders import LinkTimes, PipelineTimes, StageTimes
from hetero_megatron.schedule.stored import stored_orders
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.train import optimizer_factory
from tests.support.parity import Case, RandomSamples
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

SPEC = from_hf_config(LLAMA | {"num_hidden_layers": 6, "hidden_size": 48, "vocab_size": 64})
COUNT = 6


def peak_bytes(comm: Comm, chosen: Plan, spec: ModelSpec) -> int:
    """Most bytes that torch's allocator gave out for forwards and backwards of a step after the first, and not back."""
    compiled = CompiledPlan(chosen, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in chosen.ranks:
        return 0
    build = optimizer_factory(OptimizerConfig())
    runtime = Runtime(compiled, comm, torch.float32, lambda t, box: initial_values(t, box, spec, 7), build)
    data = RandomSamples(Case(3, len(chosen.ranks), {}, {"seq_length": chosen.seq_length}), spec.vocab_size)
    runtime.train_step(data.fetch, 0, chosen.global_batch_size, 1e-3)
    work = runtime.work(data.fetch, 0, chosen.global_batch_size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        runtime.executor.run(work)
    events = sorted((e.start_ns(), e.nbytes()) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(accumulate(size for _, size in events))


def made(pipeline: Pipeline, caps: tuple[int, ...]) -> Pipeline:
    """With an adaptive schedule in the memory of so many micro-batches per stage, of which one is slower."""
    stages = []
    for s, cap in zip(pipeline.stages, caps, strict=True):
        (row,) = micro_batch_bytes(s, SPEC, 4).values()
        seconds, memory = 0.5 + s.num_layers % 2, cap * sum(kept for kept, _, _ in row)
        stages.append(tuple(
            StageTimes(
                seconds, seconds, seconds, activation_bytes=kept, deferred_bytes=waiting, memory_bytes=memory
            )
            for kept, waiting, _ in row
        ))  # fmt: skip
    link, count = LinkTimes(0.1, 0.1), pipeline.num_micro_batches
    if pipeline.chunks > 1:
        schedule = search_adaptive_chunks(ChunkedTimes(tuple(stages), (link,) * 3), count).schedule
    else:
        schedule = search_adaptive(PipelineTimes(tuple(row[0] for row in stages), (link,) * 2), count).schedule
    assert schedule.name == "adaptive"
    return replace(pipeline, orders=stored_orders(schedule))


def under(name: str, caps: tuple[int, ...]) -> Plan:
    chunks = name in ("interleaved", "chunked", "chunked-zero-bubble")
    layers = [[[0, 1], [3, 4]], [[1, 2], [4, 5]], [[2, 3], [5, 6]]] if chunks else [[0, 1], [1, 3], [3, 6]]
    spelled = plan([pipe(2, COUNT, *(stage([r], part) for r, part in enumerate(layers)))], 32, "1f1b")
    if name not in ("adaptive", "chunked"):
        spelled["schedule"] = name.removeprefix("chunked-")
        return plan_from_dict(spelled | {"pipelines": [
            p | ({"in_flight": list(caps)} if "zero-bubble" in name else {}) for p in spelled["pipelines"]
        ]}, SPEC)  # fmt: skip
    plain = plan_from_dict(spelled | {"schedule": "interleaved" if chunks else "1f1b"}, SPEC)
    return replace(plain, schedule="adaptive", pipelines=(made(plain.pipelines[0], caps),))


# Micro-batches per stage, where there is a cap; "chunked": adaptive over chunks.
CASES = ["adaptive 4 3 2", "interleaved", "chunked 4 3 3", "1f1b", "zero-bubble 4 3 2", "adaptive 6 5 3",
         "chunked-zero-bubble 3 3 2"]  # fmt: skip


@pytest.mark.parametrize("case", quick(CASES, CASES[:2], CASES[2:4]))
def test_in_flight_memory_is_what_was_estimated_and_below_the_cap(case: str) -> None:
    name, *numbers = case.split()
    caps = tuple(map(int, numbers))
    chosen = under(name, caps)
    peaks = shared_pool().run(peak_bytes, chosen, SPEC)
    estimates = estimate_memory(chosen, SPEC, "fp32")
    messages = (HOST_LOOKAHEAD + SEND_LAG) * 2 * 32 * SPEC.hidden_size * 4  # of other micro-batches, under way
    for s, at in enumerate(chosen.pipelines[0].stages):
        activations, (rank,) = estimates[s].activations, at.ranks
        assert 0.9 * activations <= peaks[rank] <= activations + messages
        if caps:
            (row,) = micro_batch_bytes(at, SPEC, 4).values()
            assert activations <= caps[s] * sum(kept for kept, _, _ in row) + max(working for *_, working in row)
