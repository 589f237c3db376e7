"""Memory of a context member: O(own shard + 2 blocks) with a ring, O(sequence x own KV heads) with a gather."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_megatron.plan.memory import equal_shares, saved_per_layer
from hetero_megatron.planner.context.problem import ContextLayout, ContextProblem
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import layer_activation_bytes, layer_parameters

Floats = npt.NDArray[np.float64]


def state_bytes(problem: ContextProblem) -> tuple[float, float]:
    """(bytes that every member holds, bytes that all hold together) of weights, gradients and Adam states (these two
    of what is trained). fp32 masters and two moments are divided evenly over the members (distributed optimizer)."""
    model, options = problem.model, problem.options
    ends = (int(options.embed) + int(options.head)) * model.vocab_size * model.hidden_size  # embedding, and head
    held = problem.layers * layer_parameters(model) + ends
    trained = problem.layers * layer_parameters(model, trained=True) + (ends if model.lora is None else 0)
    wide = max(options.item, 4)
    optimizer = trained * (2 * wide + (4 if options.item == 2 else 0)) / options.replicas
    saved = saved_per_layer(model, equal_shares(model, 1)[0], options.item)
    states = float(held * options.item - problem.layers * saved + trained * wide)
    if not options.shard_states:
        return states, float(optimizer)
    # Two layers gathered (one ahead), one layer's gradients before they are spread.
    local = 2 * (layer_parameters(model) * options.item - saved) + layer_parameters(model, trained=True) * wide
    return float(local), states + optimizer


def member_limits(problem: ContextProblem) -> Floats:
    """[members] bytes for activations and buffers; negative where the states alone do not fit."""
    each, together = state_bytes(problem)
    share = together / len(problem.members)
    limits = np.array([m.memory for m in problem.members], dtype=np.float64) - each - share
    if problem.options.head:
        rows = min(problem.options.loss_chunk, problem.seq_length) * problem.options.micro_batch
        limits -= rows * problem.model.vocab_size * (max(problem.options.item, 4) + problem.options.item)
    return limits


def core_bytes(model: ModelSpec, item: int, wide: int, q: Any, kv: Any) -> tuple[Any, Any, Any, Any]:
    """Bytes of one layer's attention core on a rank with ``q`` query heads and ``kv`` KV heads.

    Returns:
        (kept per query token: queries, output, log-sum-exp; kept per key token: keys, values; working bytes of backward
            per query token: dQ and the output's gradient; per key token: dK and dV in at least fp32).
    """
    d = model.head_dim
    return (2 * d * item + 4) * q, 2 * d * item * kv, d * (wide + item) * q, 2 * d * wide * kv


def home_bytes(model: ModelSpec, item: int, recompute: str, alone: bool) -> int:
    """Bytes per own token and layer, over all heads, that attention keeps besides its core: the output before the
    projection (shared with the core if the member is its whole group, ``alone``); with selective recompute also q, k
    and v."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if recompute == "selective":
        return item * (2 * q + 2 * kv)
    return 0 if alone else item * q


def outside_bytes(model: ModelSpec, item: int, tp: float) -> float:
    """Bytes per own token that a rank with 1/tp of a layer keeps outside attention."""
    kept = core_bytes(model, item, 4, model.num_heads, model.num_kv_heads)
    return layer_activation_bytes(model, 4096, "none", item, tp) / 4096 - (kept[0] + kept[1]) / tp


def block_bytes(model: ModelSpec, item: int, wide: int, block: int) -> int:
    """Bytes per KV head and sequence of the ring's buffers: two blocks of K and V, and of their gradients."""
    return 2 * model.head_dim * (item + wide) * 2 * block


def token_bytes(problem: ContextProblem, alone: bool, tp: int) -> tuple[float, float]:
    """(kept, working) bytes per own token of a member of ``tp`` ranks; ``alone``: it is its whole group."""
    model, options = problem.model, problem.options
    layer = tp * outside_bytes(model, options.item, tp) + home_bytes(model, options.item, options.recompute, alone)
    rows = options.micro_batch
    if options.recompute == "full":
        kept = rows * options.in_flight * problem.layers * model.hidden_size * float(options.item)
        return kept, rows * float(layer)
    return rows * options.in_flight * problem.layers * float(layer), 0.0


def head_bytes(problem: ContextProblem, h: Any, kv: Any) -> tuple[Any, Any]:
    """(kept, working) bytes per token of the *group*, for a member with ``h`` query heads and ``kv`` KV heads."""
    model, options = problem.model, problem.options
    queries, keys, dq, dkv = core_bytes(model, options.item, options.wide, h, kv)
    rows = options.micro_batch
    if options.recompute != "none":
        return 0.0 * h, rows * (queries + keys + dq + dkv)
    return rows * options.in_flight * problem.layers * (queries + keys), rows * (dq + dkv)


def group_bytes(problem: ContextProblem, s: Floats, h: Floats, kv: Floats) -> Floats:
    """[members] activation bytes of a group's members, without exchange buffers."""
    tp = len(problem.members[0].ranks)
    kept, work = token_bytes(problem, len(s) == 1, tp)
    kept_heads, work_heads = head_bytes(problem, h, kv)
    result: Floats = s * (kept + work) + float(s.sum()) * (kept_heads + work_heads)
    return result


def kv_bytes(problem: ContextProblem, layout: ContextLayout) -> float:
    """Bytes of exchange buffers per KV head: two blocks of K, V and their gradients; with ``gather``, keys and values
    of the whole sequence, which every layer keeps for its backward."""
    model, options = problem.model, problem.options
    if layout.transport != "gather":
        return float(block_bytes(model, options.item, options.wide, layout.block) * options.micro_batch)
    layers = options.in_flight * problem.layers if options.recompute == "none" else 1
    per_token = 2 * model.head_dim * (options.item * layers + options.wide)
    return float(per_token * problem.seq_length * options.micro_batch)
