"""Linear attention across context groups: random ragged members against transformers' rule on whole documents."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.comm.fake import FakeComm
from hetero_megatron.model.gated_delta_net import DeltaCore
from hetero_megatron.model.layers import Context
from hetero_megatron.ops import default_kernels
from hetero_megatron.parallel.context_states import ContextDelta, StageStates
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.context_plan import StageContext, context_groups, stage_contexts
from hetero_megatron.plans.linear_attention import chain, passed_bytes
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.moe_models import HYBRIDS
from tests.support.pool import shared_pool
from tests.support.qwen_next_reference import recurrent
from tests.support.random_plans import random_context
from tests.support.small_plans import pipe, plan, stage

MODEL = HYBRIDS["qwen3_next"] | {
    "num_hidden_layers": 1, "layer_types": ["linear_attention"], "max_position_embeddings": 512,
}
SPEC = from_hf_config(MODEL)  # three key heads, six value heads, four taps
NAMES = ("q", "k", "v", "b", "a", "q_conv", "k_conv", "v_conv", "A_log", "dt_bias")
Arrays = dict[str, tuple[slice, Any]]  # by name, of which heads


def widths(spec: ModelSpec) -> list[int]:
    """Features per key head of what the core gets."""
    assert spec.delta is not None
    keys, values = spec.delta.key_dim, spec.delta.values_per_key * spec.delta.value_dim
    each = spec.delta.values_per_key
    return [keys, keys, values, each, each, keys, keys, values, each, each]


def tensors(seed: int, rows: int, length: int) -> list[torch.Tensor]:
    """In fp64, by key head: q, k, v, b, a [rows, length, key heads, n], filters [key heads, n, taps], A_log and dt_bias
    [key heads, n]; last the gradient of the output, as v."""
    draw, each, delta = torch.Generator().manual_seed(seed), widths(SPEC), SPEC.delta
    assert delta is not None
    tokens = [torch.randn(rows, length, delta.key_heads, n, generator=draw, dtype=torch.float64) for n in each[:5]]
    filters = [torch.randn(delta.key_heads, n, delta.kernel, generator=draw, dtype=torch.float64) for n in each[5:8]]
    numbers = [torch.randn(delta.key_heads, n, generator=draw, dtype=torch.float64) for n in each[8:]]
    return [*tokens, *filters, *numbers, torch.randn(tokens[2].shape, generator=draw, dtype=torch.float64)]


def reference(whole: list[torch.Tensor], documents: list[list[int]]) -> list[torch.Tensor]:
    """The output and the gradients, document by document."""
    *inputs, grad = whole
    inputs = [x.clone().requires_grad_() for x in inputs]
    q, k, v, b, a, *filters, a_log, dt_bias = inputs
    delta, out = SPEC.delta, torch.zeros_like(v)
    assert delta is not None
    g = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    for row, starts in enumerate(documents):
        for first, end in zip(starts, [*starts[1:], v.shape[1]], strict=True):
            turned = []
            for x, w in zip((q, k, v), filters, strict=True):
                features = x[row, first:end].flatten(1).T
                padded = torch.nn.functional.pad(features, (delta.kernel - 1, 0))[None]
                y = torch.nn.functional.conv1d(padded, w.flatten(0, 1)[:, None], groups=len(features))
                turned.append(torch.nn.functional.silu(y)[0].T[None])
            repeated = [x.unflatten(-1, (-1, delta.key_dim)) for x in turned[:2]]
            repeated = [x.repeat_interleave(delta.values_per_key, 2) for x in repeated]
            values = turned[2].unflatten(-1, (-1, delta.value_dim))
            result, _ = recurrent(
                *repeated, values, g=g[row : row + 1, first:end].flatten(2),
                beta=b[row : row + 1, first:end].flatten(2).sigmoid(), initial_state=None, output_final_state=False,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            out[row, first:end] = result[0].unflatten(1, (delta.key_heads, -1)).flatten(2)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def core_of(context: StageContext, comm: Comm, dtype: torch.dtype = torch.float64) -> ContextDelta:
    member = context.member(comm.rank)
    core = DeltaCore(SPEC, default_kernels(SPEC, member.held, False, dtype, tiled=True))
    return ContextDelta(StageStates(context, comm), core)


def own(context: StageContext, rank: int, whole: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's parts, leaves, with heads and their features in one axis."""
    member = context.member(rank)
    tokens, heads = [t for a, b in member.tokens for t in range(a, b)], slice(*member.held.key_heads)
    parts = [x[:, tokens, heads].flatten(2) for x in (*whole[:5], whole[-1])]
    parts[5:5] = [x[heads].flatten(0, 1) for x in whole[5:10]]
    return [x.contiguous().requires_grad_() for x in parts]


def run_rank(comm: Comm, made: Plan, seed: int, documents: list[list[int]] | None) -> tuple[Any, ...] | None:
    """(tokens, key heads, output and gradients) of this rank."""
    only = made.pipelines[0].stages[0]
    comm.create_groups(context_groups(SPEC, only))
    if comm.rank not in made.ranks:
        return None
    (context,) = stage_contexts(SPEC, only, made.seq_length)
    whole = tensors(seed, made.pipelines[0].micro_batch_size, made.seq_length)
    *inputs, grad = own(context, comm.rank, whole)
    out = core_of(context, comm)(*inputs[:5], tuple(inputs[5:]), Context(documents, {}))
    out.flatten(2).backward(grad)
    member = context.member(comm.rank)
    grads = [np.zeros(x.shape) if x.grad is None else x.grad.numpy() for x in inputs]
    return [t for a, b in member.tokens for t in range(a, b)], member.held.key_heads, [out.detach().numpy(), *grads]


def test_random_ragged_members_equal_whole_documents() -> None:
    """Where documents are packed, many begin with a run of tokens: in no row, in one, or in both."""
    begun = set[int]()
    for seed in range(4):
        rng = random.Random(seed)
        ranks, length, rows = rng.randint(2, 5), rng.randint(5, 24), 1 + seed % 2
        numbers = list(range(ranks))
        spelled = stage(numbers, [0, 1], **random_context(rng, numbers, length, SPEC.num_heads))
        made = plan_from_dict(plan([pipe(rows, 1, spelled)], length), SPEC)
        (context,) = stage_contexts(SPEC, made.pipelines[0].stages[0], length)
        borders = [run.tokens[0] for run in chain(context)]
        likely = [0.5 if t in borders else 0.1 for t in range(length)]
        starts = [sorted({0, *(t for t in range(1, length) if rng.random() < likely[t])}) for _ in range(rows)]
        documents = starts if seed % 2 else None
        begun |= {sum(border in row for row in documents or ()) for border in borders[1:]}
        whole = tensors(seed, rows, length)
        want = reference(whole, documents or [[0]] * rows)
        got = [np.zeros(x.shape) for x in want]
        for result in shared_pool().run(run_rank, made, seed, documents):
            if result is None:
                continue
            tokens, (a, b), arrays = result
            for total, array, of_tokens in zip(got, arrays, [True] * 6 + [False] * 5, strict=True):
                if of_tokens:
                    total[:, tokens, a:b] += array.reshape(rows, len(tokens), b - a, total.shape[-1])
                else:
                    total[a:b] += array.reshape(b - a, *total.shape[1:])
        for name, mine, theirs in zip(("out", *NAMES), got, want, strict=True):
            error = np.linalg.norm(mine - theirs.numpy()) / np.linalg.norm(theirs.numpy())
            assert error < 1e-10, f"{name}: {error:.3g}, seed {seed}, {made.canonical_json()}, {documents}"
    assert begun == {0, 1, 2}


def test_bytes_are_those_that_are_priced_and_do_not_grow_with_the_length() -> None:
    """States are in fp32 where activations have 16 bits."""
    sent = []
    fp64, bf16 = (torch.float64, 8, 8), (torch.bfloat16, 2, 4)  # dtype, bytes of an activation, of a state's element
    for length, (dtype, item, wide) in ((60, fp64), (300, fp64), (60, bf16)):
        spelled = stage([0, 1, 2, 3], [0, 1], tp_split=[[2, 1], [1], [1]], context=[
            {"ranks": [[0, 1]], "tokens": [length // 2], "heads": [4]},
            {"ranks": [2, 3], "tokens": [length // 5, length - length // 2 - length // 5], "heads": [1, 3]},
        ])  # fmt: skip
        made = plan_from_dict(plan([pipe(2, 1, spelled)], length), SPEC)
        (context,) = stage_contexts(SPEC, made.pipelines[0].stages[0], length)
        priced: dict[tuple[int, int], int] = {}
        for volumes in passed_bytes(context, item, wide):
            for (a, b), size in volumes.items():
                priced[a, b] = priced.get((a, b), 0) + 2 * size
                priced[b, a] = priced.get((b, a), 0) + 2 * size  # in backward
        for rank in (0, 3):
            comm = FakeComm(rank, torch.device("cpu"))
            comm.create_groups(context_groups(SPEC, made.pipelines[0].stages[0]))
            *inputs, grad = own(context, rank, [x.to(dtype) for x in tensors(0, 2, length)])
            out = core_of(context, comm, dtype)(*inputs[:5], tuple(inputs[5:]), Context(None, {}))
            out.flatten(2).backward(grad)
            want = {b: size for (a, b), size in priced.items() if a == rank}
            assert {b: size for b, size in comm.sent_bytes.items() if size} == want
        sent.append(priced)
    assert sent[0] == sent[1]
