"""Memory of a context member while its shares are chosen, by the formulas of concrete plans; several ranks of a member
(TP) count together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_megatron.planner.context.problem import ContextProblem
from hetero_megatron.plans.memory.context_layers import ContextLayers
from hetero_megatron.plans.memory.uniform_stages import UniformStageMemory
from hetero_megatron.spec.backward_bytes import Cores, layer_backward_bytes, mlp_kept_bytes

Floats = npt.NDArray[np.float64]


def member_states(problem: ContextProblem) -> tuple[float, float]:
    """(bytes that every member holds, bytes that all hold together) of weights, gradients and Adam states (these two
    of what is trained). fp32 masters and two moments are divided evenly over the members (distributed optimizer)."""
    options, memory = problem.options, UniformStageMemory(problem.model, problem.options.item)

    def states(layers: int, embed: bool, head: bool) -> tuple[int, int, int]:
        cut = 1, layers, embed, head
        return memory.states(*cut, memory.trained(*cut) / options.replicas)

    weights, gradients, optimizer = states(problem.layers, options.embed, options.head)
    if not options.shard_states:
        return weights + gradients, optimizer
    # Two layers gathered (one ahead), one layer's gradients before they are spread.
    return states(2, False, False)[0] + states(1, False, False)[1], weights + gradients + optimizer


def member_limits(problem: ContextProblem) -> Floats:
    """[members] bytes for activations and buffers; negative where the states alone do not fit."""
    member_bytes, shared_bytes = member_states(problem)
    share = shared_bytes / len(problem.members)
    limits = np.array([m.memory for m in problem.members], dtype=np.float64) - member_bytes - share
    if problem.options.head:
        rows = min(problem.options.loss_chunk, problem.seq_length) * problem.options.micro_batch
        limits -= rows * problem.model.vocab_size * (max(problem.options.item, 4) + problem.options.item)
    return limits


def layers_of(problem: ContextProblem) -> ContextLayers:
    """The stage's layers, with the bytes that they take per token."""
    options, layers = problem.options, problem.layers
    full, selective = layers if options.recompute == "full" else 0, options.recompute == "selective"
    return ContextLayers(problem.model, layers, full, selective, options.item, options.wide)


def token_bytes(problem: ContextProblem, alone: bool) -> tuple[float, float]:
    """Bytes per own token of a member while backward is in (an MLP, the attention core); ``alone``: it is its whole
    group."""
    model, layers, options = problem.model, layers_of(problem), problem.options
    tp, tokens = len(problem.members[0].ranks), problem.seq_length
    kept_bytes, recomputed_bytes = options.in_flight * layers.per_own_token(tp, alone), 0.0
    if layers.full:
        kept_plain = replace(layers, layers=1, full=0).per_own_token(tp, alone)
        recomputed_bytes = kept_plain - replace(layers, layers=1, full=1).per_own_token(tp, alone)
    in_mlp = layer_backward_bytes(model, tokens, options.item, tp, tp, cores=Cores(0.0)) / tokens
    mlp_bytes = mlp_kept_bytes(model, 1.0, options.item, tp, model.moe_share)
    moments = (kept_bytes + recomputed_bytes + in_mlp, max(kept_bytes + recomputed_bytes - mlp_bytes, 1.0))
    return tuple(tp * options.micro_batch * moment for moment in moments)  # type: ignore[return-value]


def head_bytes(problem: ContextProblem, h: Any, kv: Any) -> tuple[Any, Any]:
    """Bytes per token of the *group* at the same moments, for a member with ``h`` query heads and ``kv`` KV heads."""
    layers, options = layers_of(problem), problem.options
    core_parts = layers.per_core_token(h, kv)
    kept_bytes, work_bytes = (sum(part[i] for part in core_parts) for i in (0, 1))
    recomputed_bytes = 0.0
    if layers.full:
        recomputed_bytes = sum(kept_bytes for kept_bytes, _ in replace(layers, layers=1, full=0).per_core_token(h, kv))
    core_bytes = options.in_flight * kept_bytes + recomputed_bytes
    return options.micro_batch * core_bytes, options.micro_batch * (core_bytes + work_bytes)


def group_bytes(problem: ContextProblem, s: Floats, h: Floats, kv: Floats) -> Floats:
    """[members] activation bytes of a group's members, without exchange buffers."""
    by_token, by_head = token_bytes(problem, len(s) == 1), head_bytes(problem, h, kv)
    largest: Floats = np.maximum(*(s * by_token[i] + float(s.sum()) * by_head[i] for i in (0, 1)))
    if problem.model.delta is None or len(problem.members) == 1:
        return largest
    kept, working = state_bytes(problem, s)
    in_rule = s * by_token[1] + float(s.sum()) * by_head[0] + working
    return np.maximum(largest, in_rule) + kept


def state_bytes(problem: ContextProblem, s: Floats) -> tuple[Floats, Floats]:
    """[members] bytes of linear attention whose states come from other members, with two runs of tokens each: kept, and
    in backward of a layer."""
    options, layers = problem.options, layers_of(problem)
    kept, working = layers.states(s, s, 2 * (s > 0), s / 2)
    if layers.full:
        kept = kept + replace(layers, layers=1, full=0).states(s, s, 2 * (s > 0), s / 2)[0] / options.in_flight
    return options.micro_batch * options.in_flight * kept, options.micro_batch * working


def ring_bytes(problem: ContextProblem, block: int) -> float:
    """Bytes of the ring's buffers per KV head: two blocks of K, V and their gradients."""
    return float(problem.options.micro_batch * layers_of(problem).blocks(1, block))
