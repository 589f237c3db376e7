"""Bytes of a context member: O(own shard + 2 blocks) with a ring, O(sequence x own KV heads) with a gather."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_megatron.planner.context_problem import ContextLayout, ContextProblem
from hetero_megatron.spec.flops import layer_parameters

Floats = npt.NDArray[np.float64]


def state_bytes(problem: ContextProblem) -> tuple[float, float]:
    """(bytes that every member holds, bytes that all hold together) of weights, gradients and Adam's state.

    fp32 masters and two moments of 16-bit weights are divided evenly over the members (the sharded optimizer).
    """
    model, options = problem.model, problem.options
    elements = problem.layers * layer_parameters(model)
    elements += (int(options.embed) + int(options.head)) * model.vocab_size * model.hidden_size  # embedding, and head
    wide = max(options.item, 4)
    optimizer = elements * (2 * wide + (4 if options.item == 2 else 0)) / options.replicas
    if not options.shard_states:
        return float(elements * (options.item + wide)), float(optimizer)
    # Two layers gathered (one ahead), one layer's gradients before they are spread.
    local = layer_parameters(model) * (2 * options.item + wide)
    return float(local), float(elements * (options.item + wide) + optimizer)


def member_limits(problem: ContextProblem) -> Floats:
    """Bytes that activations and buffers of each member may take; negative where its states alone do not fit."""
    each, together = state_bytes(problem)
    share = together / len(problem.members)
    limits = np.array([m.memory for m in problem.members], dtype=np.float64) - each - share
    if problem.options.head:
        rows = min(problem.options.loss_chunk, problem.seq_length) * problem.options.micro_batch
        limits -= rows * problem.model.vocab_size * (max(problem.options.item, 4) + problem.options.item)
    return limits


def token_bytes(problem: ContextProblem, alone: bool, tp: int) -> tuple[float, float]:
    """(kept, working) bytes per owned token: outside attention, as ``layer_activation_bytes`` counts them.

    Args:
        alone: the member is its whole group, so that attention's output is not held twice.
        tp: ranks of the member; inputs that TP gathers are held by each of them.
    """
    model, options = problem.model, problem.options
    h, q = model.hidden_size, model.num_heads * model.head_dim
    matrices = 3 if model.activation == "swiglu" else 2
    layer = options.item * (2 * h + 2 * h * tp + matrices * model.ffn_hidden_size + (0 if alone else q))
    rows = options.micro_batch
    if options.recompute == "full":
        return rows * options.in_flight * problem.layers * h * float(options.item), rows * float(layer)
    return rows * options.in_flight * problem.layers * float(layer), 0.0


def head_bytes(problem: ContextProblem, h: Any, kv: Any) -> tuple[Any, Any]:
    """(kept, working) bytes per token of the *group*, of a member with ``h`` query heads and ``kv`` KV heads.

    Kept: q, k, v, the output, and the log-sum-exp. Working: dQ, dK and dV in fp32, and the output's gradient.
    """
    model, options = problem.model, problem.options
    kept = model.head_dim * options.item * (2 * h + 2 * kv) + (0 if options.recompute == "selective" else 4) * h
    work = model.head_dim * ((options.wide + options.item) * h + 2 * options.wide * kv)
    rows = options.micro_batch
    if options.recompute == "full":
        return 0.0 * h, rows * (kept + work)
    return rows * options.in_flight * problem.layers * kept, rows * work


def group_bytes(problem: ContextProblem, s: Floats, h: Floats, kv: Floats) -> Floats:
    """Activation bytes per member of a group, without what travels between groups."""
    tp = len(problem.members[0].ranks)
    kept, work = token_bytes(problem, len(s) == 1, tp)
    kept_heads, work_heads = head_bytes(problem, h, kv)
    result: Floats = s * (kept + work) + float(s.sum()) * (kept_heads + work_heads)
    return result


def kv_bytes(problem: ContextProblem, layout: ContextLayout) -> float:
    """Bytes of exchange buffers per KV head that a member needs: two blocks of K, V and their gradients, or all."""
    options = problem.options
    per_token = 2 * problem.model.head_dim * (options.item + options.wide) * options.micro_batch
    tokens = problem.seq_length if layout.transport == "gather" else 2 * layout.block
    return float(per_token * tokens)
