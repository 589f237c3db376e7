"""On a device the host runs ahead: how often a step holds it up, and what its times are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.comm.device_clock import DeviceClock
from hetero_megatron.model import initial_values
from hetero_megatron.ops.optimizer_ops import adamw_aten
from hetero_megatron.parallel.optimizer import AdamW
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.failure import StepGuard
from hetero_megatron.training.rank_platform import plan_for
from hetero_megatron.training.runtime import Runtime
from tests.support.parity import Case, RandomSamples
from tests.support.pool import Pool
from tests.support.vendors import with_attention

MODEL = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6,
    "num_key_value_heads": 3, "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
MICRO_BATCHES = 4
PLANS: dict[str, list[dict[str, Any]]] = {
    "one rank": [{"ranks": [0], "layers": [0, 3]}],
    # Query heads that do not use the local key-value heads evenly: each one's is looked up.
    "heads that are looked up": [{"ranks": [0, 1], "layers": [0, 3], "tp": 2, "tp_split": [1, 3]}],
    "pipeline": [{"ranks": [0], "layers": [0, 1]}, {"ranks": [1], "layers": [1, 3]}],
    "context": [{"ranks": [0, 1], "layers": [0, 3], "context": [{"ranks": [0, 1], "tokens": [5, 3], "heads": [2, 4]}]}],
}  # fmt: skip

EMULATED_RANKS = 2
pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.timeout(1800)]  # building takes minutes


def case(stages: list[dict[str, Any]], micro_batches: int, **model: Any) -> Case:
    pipelines = [{"micro_batch_size": 1, "num_micro_batches": micro_batches, "stages": stages}]
    plan = {"version": 1, "seq_length": 8, "global_batch_size": micro_batches, "pipelines": pipelines}
    return Case(3, 2, MODEL | model, plan, packed=True, masked=True)


def waits_of_a_step(comm: Comm, case: Case) -> dict[str, Any]:
    """By what the third step held up this rank's host, and its times."""
    spec = from_hf_config(case.model)
    plan = with_attention(plan_for(plan_from_dict(case.plan, spec), comm.islands), comm.device)
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return {}
    assert comm.accelerator is not None
    before_clock, comm.clock = comm.clock, DeviceClock(comm.accelerator)
    runtime = Runtime(
        compiled, comm, torch.float32, lambda t, box: initial_values(t, box, spec, 0),
        lambda groups: AdamW(groups, adamw_aten, (0.9, 0.95), 1e-8),
    )  # fmt: skip
    data, guard, size = RandomSamples(case, spec.vocab_size), StepGuard(), plan.global_batch_size
    emu = torch.emu  # type: ignore[attr-defined]
    for step in range(3):
        waits = emu.host_waits()
        stats = guard.step(runtime, data.fetch, step + 1, step * size, size, 1e-3, clip_grad=1.0)
    after = emu.host_waits()
    comm.clock = before_clock
    at = plan.ranks.index(comm.rank)
    return {
        "waits": {k: n - waits.get(k, 0) for k, n in after.items() if n > waits.get(k, 0)}, "loss": stats.loss,
        "busy": stats.busy[at], "bubble": stats.bubble[at], "communication": stats.communication[at],
        "actions": [(a.action.kind, a.start, a.end, a.computed) for a in stats.actions],
    }  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_step_holds_up_the_host_once_and_a_micro_batch_never(name: str, pool: Pool) -> None:
    for micro_batches in (2, MICRO_BATCHES):
        for found in pool.run(waits_of_a_step, case(PLANS[name], micro_batches)):
            if found:
                assert sum(found["waits"].values()) <= 1, found["waits"]


MIXTURE = {
    "model_type": "mixtral", "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6,
    "num_key_value_heads": 3, "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64,
    "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize("name", ["one rank", "experts"])
def test_experts_hold_up_the_host_once_for_their_counts(name: str, pool: Pool) -> None:
    """Of a layer and a micro-batch: how many tokens each expert here has, and, where they are exchanged, how many go
    where, are read together."""
    experts = {"tp": 2} if name == "experts" else {}
    stages = [{"ranks": [0, 1][: 2 if experts else 1], "layers": [0, 3], **experts}]
    waits = []
    for micro_batches in (2, 4):
        found = pool.run(waits_of_a_step, replace(case(stages, micro_batches), model=MIXTURE))
        waits.append([sum(x["waits"].values()) for x in found if x])
    assert all(before <= 1 + 2 * 3 and after <= 1 + 4 * 3 for before, after in zip(*waits, strict=True)), waits


def test_a_tied_head_holds_up_no_stage(pool: Pool) -> None:
    """Its gradient is there before the last backward, and its sum waits for the first stage's embedding."""
    for found in pool.run(waits_of_a_step, case(PLANS["pipeline"], MICRO_BATCHES, tie_word_embeddings=True)):
        assert sum(found["waits"].values()) <= 1, found["waits"]


def test_times_are_of_the_devices_stream(pool: Pool) -> None:
    """They add up, and an action computes no longer than it lasts."""
    for found in pool.run(waits_of_a_step, case(PLANS["pipeline"], MICRO_BATCHES)):
        actions = found["actions"]
        assert found["busy"] > 0 and found["bubble"] >= 0
        assert all(start <= end and 0 <= computed <= end - start + 1e-9 for _, start, end, computed in actions)
        assert [a[1] for a in actions] == sorted(a[1] for a in actions)
        whole = found["busy"] + found["bubble"] + found["communication"]
        assert whole >= actions[-1][2] - actions[0][1] - 1e-6
        computed = sum(seconds for kind, *_, seconds in actions if kind != "REDUCE")
        assert found["busy"] == pytest.approx(computed, rel=1e-9)
        assert {kind for kind, *_ in actions} > {"F", "B"}


def test_one_rank_waits_for_no_neighbour(pool: Pool) -> None:
    found = pool.run(waits_of_a_step, case(PLANS["one rank"], MICRO_BATCHES))[0]
    assert found["bubble"] == 0 and found["loss"] == pytest.approx(4.1, abs=1)
