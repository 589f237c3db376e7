"""Context x head parallel attention: random ragged groups against torch's own attention on whole sequences."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.model.layers import Context
from hetero_megatron.parallel.context import ContextAttention, StageAttention
from hetero_megatron.plans import Plan, plan_from_dict, to_dict
from hetero_megatron.plans.context_plan import context_groups, stage_contexts
from hetero_megatron.plans.importers.flagscale import FlagScaleParallel, from_flagscale
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.parity import Case, check_case
from tests.support.pool import shared_pool
from tests.support.random_plans import random_context
from tests.support.selection import quick

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 32,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


def make_spec(heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> ModelSpec:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    shape |= {"hidden_size": heads * head_dim}
    family = {"model_type": "mistral", "sliding_window": window} if window is not None else {}
    return from_hf_config({**LLAMA, **shape, **family})


def make_plan(spec: ModelSpec, stage: dict[str, Any], seq_length: int, batch: int) -> Plan:
    pipeline = {"micro_batch_size": batch, "num_micro_batches": 1, "stages": [{"layers": [0, 1], **stage}]}
    return plan_from_dict({"seq_length": seq_length, "global_batch_size": batch, "pipelines": [pipeline]}, spec)


def tensors(spec: ModelSpec, seq_length: int, batch: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, whole."""
    generator = torch.Generator().manual_seed(seed)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads)
    return [torch.randn(batch, seq_length, h, spec.head_dim, generator=generator).to(dtype) for h in heads]


def visible_pairs(length: int, documents: list[list[int]] | None, window: int | None, batch: int) -> torch.Tensor:
    """[b, s, s] bool by brute force."""
    position = torch.arange(length)
    distance = position[:, None] - position[None]
    allowed = ((distance >= 0) & (distance < (window or length))).expand(batch, length, length).clone()
    for row, starts in enumerate(documents or []):
        of = torch.bucketize(position, torch.tensor(starts), right=True)
        allowed[row] &= of[:, None] == of[None]
    return allowed


def reference(spec: ModelSpec, whole: list[torch.Tensor], documents: list[list[int]] | None) -> list[torch.Tensor]:
    """out, dq, dk, dv by torch's scaled_dot_product_attention with an explicit mask, in the tensors' dtype."""
    q, k, v = (x.clone().requires_grad_() for x in whole[:3])
    mask = visible_pairs(q.shape[1], documents, spec.widest_window, q.shape[0])[:, None]
    repeat = spec.queries_per_kv
    keys, values = (x.repeat_interleave(repeat, dim=2).transpose(1, 2) for x in (k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
    out = out.transpose(1, 2)
    out.backward(whole[3])
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def run_rank(
    comm: Comm, plan: Plan, spec: ModelSpec, seed: int, dtype: torch.dtype, documents: list[list[int]] | None
) -> dict[str, Any]:
    """This rank's parts of out, dq, dk, dv as (box over (token, head), array)."""
    stage = plan.pipelines[0].stages[0]
    comm.create_groups(context_groups(spec, stage))
    if comm.rank not in plan.ranks:
        return {}
    (context,) = stage_contexts(spec, stage, plan.seq_length)
    member = context.member(comm.rank)
    shared = StageAttention(context, comm, spec.widest_window)
    tokens = [t for a, b in member.tokens for t in range(a, b)]
    (q0, q1), (kv0, kv1) = member.held.q_heads, member.held.kv_heads
    heads = [(q0, q1), (kv0, kv1), (kv0, kv1), (q0, q1)]
    whole = tensors(spec, plan.seq_length, stage.replicas[0][1], seed, dtype)
    q, k, v, grad = (x[:, tokens, a:b].contiguous() for x, (a, b) in zip(whole, heads, strict=True))
    for x in (q, k, v):
        x.requires_grad_()
    out = ContextAttention(shared)(q, k, v, None, Context(documents, {}))
    assert out.shape == q.shape and out.dtype == q.dtype
    out.backward(grad)
    arrays = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {
        "tokens": tokens,
        **{n: (h, x.numpy()) for (n, x), h in zip(arrays.items(), [heads[0], *heads[:3]], strict=True)},
    }


def run_case(
    spec: ModelSpec, plan: Plan, seed: int, dtype: torch.dtype, documents: list[list[int]] | None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(want, got) of out, dq, dk, dv; partial gradients added over the ranks that hold a head."""
    batch = plan.pipelines[0].micro_batch_size
    want = reference(spec, tensors(spec, plan.seq_length, batch, seed, dtype), documents)
    ranks = shared_pool().run(run_rank, plan, spec, seed, dtype, documents)
    result = {}
    for name, whole in zip(("out", "dq", "dk", "dv"), want, strict=True):
        total = np.zeros(whole.shape, whole.numpy().dtype)
        for got in ranks:
            if got:
                (a, b), array = got[name]
                total[:, got["tokens"], a:b] += array
        result[name] = (whole.numpy(), total)
    return result


def check(
    spec: ModelSpec, plan: Plan, seed: int, documents: list[list[int]] | None, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        bound = {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]
        for name, (want, got) in run_case(spec, plan, seed, dtype, documents).items():
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error <= bound, (
                f"{name} in {dtype}: relative error {error:.3g}, {plan.canonical_json()}, {documents}"
            )


def random_documents(rng: random.Random, length: int, batch: int) -> list[list[int]]:
    return [sorted({0, *(t for t in range(1, length) if rng.random() < 0.08)}) for _ in range(batch)]


@pytest.mark.parametrize("seed", quick(range(16), range(3), range(3, 7)))
def test_random_ragged_groups_equal_whole_attention(seed: int) -> None:
    rng = random.Random(seed)
    heads, kv_heads = rng.choice([(4, 4), (4, 2), (8, 1), (8, 2), (6, 3), (6, 2), (7, 7), (5, 1), (8, 8)])
    window = rng.choice([None, None, None, 5, 17])
    spec = make_spec(heads, kv_heads, rng.choice([4, 8]), window)
    length, batch, ranks = rng.randint(9, 90), rng.randint(1, 3), rng.randint(2, 8)
    stage = {"ranks": list(range(ranks)), **random_context(rng, list(range(ranks)), length, heads)}
    plan = make_plan(spec, stage, length, batch)
    documents = random_documents(rng, length, batch) if rng.random() < 0.5 else None
    check(spec, plan, seed, documents, (torch.float64, torch.float32))


# From Megatron's flags, whole training steps


MODEL = {
    **LLAMA,
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}
BY_FLAGS = {
    "ring": (4, {"context_parallel_size": 4}),
    "gathered": (3, {"context_parallel_size": 3, "cp_comm_type": ["allgather"]}),
    "heads": (4, {"context_parallel_size": 4, "cp_comm_type": ["a2a"]}),
    "both": (
        6,
        {
            "context_parallel_size": 6,
            "cp_comm_type": ["a2a+p2p"],
            "hierarchical_context_parallel_sizes": [2, 3],
        },
    ),
    "with_tp_and_pp": (
        8,
        {
            "context_parallel_size": 2,
            "cp_comm_type": ["a2a"],
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
        },
    ),
    "with_dp": (8, {"context_parallel_size": 4, "tensor_model_parallel_size": 1, "recompute_granularity": "full"}),
}


@pytest.mark.parametrize("name", quick(BY_FLAGS, ["both"], ["with_tp_and_pp"]))
def test_megatron_flags_equal_one_process(name: str) -> None:
    ranks, flags = BY_FLAGS[name]
    size = MegatronParallel(ranks, 11, micro_batch_size=2, global_batch_size=8, **flags)  # type: ignore[arg-type]
    plan = from_megatron(size, from_hf_config(MODEL))
    case = Case(11, ranks, MODEL, to_dict(plan), packed=name in ("ring", "both"), masked=True)
    check_case(case, shared_pool())


def test_flagscale_meshes_may_differ_in_context_parallelism() -> None:
    spec = from_hf_config(MODEL)
    meshes = [1, 2, 1, 1, 1, 2, 1, 1, 1, 1]
    plan = from_flagscale(FlagScaleParallel(11, meshes, [1, 1], micro_batch_size=2, global_batch_size=4), spec)
    first, second = plan.pipelines[0].stages
    assert [u.ranks for u in first.units] == [(0,), (1,)] and [u.ranks for u in second.units] == [(2, 3)]
    assert [u.num_tokens for u in first.units] == [6, 5]
    check_case(Case(12, 4, MODEL, to_dict(plan)), shared_pool())


def test_megatron_ranks_run_through_tp_then_cp_then_dp() -> None:
    spec = from_hf_config(MODEL)
    plan = from_megatron(MegatronParallel(8, 16, tensor_model_parallel_size=2, context_parallel_size=2), spec)
    assert [[u.ranks for u in p.stages[0].units] for p in plan.pipelines] == [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]
    assert plan.pipelines[0].stages[0].units[0].tokens == ((0, 4), (12, 16))
