"""Memory of a context member while its shares are chosen, by the formulas of concrete plans; several ranks of a member
(TP) count together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_megatron.planner.context.problem import ContextProblem
from hetero_megatron.plans.memory.activations import ContextLayers, KeptWorking
from hetero_megatron.plans.memory.uniform_stages import UniformStageMemory

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
    each, together = member_states(problem)
    share = together / len(problem.members)
    limits = np.array([m.memory for m in problem.members], dtype=np.float64) - each - share
    if problem.options.head:
        rows = min(problem.options.loss_chunk, problem.seq_length) * problem.options.micro_batch
        limits -= rows * problem.model.vocab_size * (max(problem.options.item, 4) + problem.options.item)
    return limits


def layers_of(problem: ContextProblem) -> ContextLayers:
    """The stage's layers, with the bytes that they take per token."""
    options, layers = problem.options, problem.layers
    full, selective = layers if options.recompute == "full" else 0, options.recompute == "selective"
    return ContextLayers(problem.model, layers, full, selective, options.item, options.wide)


def token_bytes(problem: ContextProblem, alone: bool) -> float:
    """Bytes per own token of a member; ``alone``: it is its whole group."""
    tp = len(problem.members[0].ranks)
    return tp * _in_flight(problem, layers_of(problem).per_own_token(tp, alone))


def head_bytes(problem: ContextProblem, h: Any, kv: Any) -> Any:
    """Bytes per token of the *group*, for a member with ``h`` query heads and ``kv`` KV heads."""
    return sum(_in_flight(problem, part) for part in layers_of(problem).per_core_token(h, kv))


def group_bytes(problem: ContextProblem, s: Floats, h: Floats, kv: Floats) -> Floats:
    """[members] activation bytes of a group's members, without exchange buffers."""
    result: Floats = s * token_bytes(problem, len(s) == 1) + float(s.sum()) * head_bytes(problem, h, kv)
    return result


def ring_bytes(problem: ContextProblem, block: int) -> float:
    """Bytes of the ring's buffers per KV head: two blocks of K, V and their gradients."""
    return float(problem.options.micro_batch * layers_of(problem).blocks(1, block))


def _in_flight(problem: ContextProblem, each: KeptWorking) -> Any:
    kept, working = each
    return problem.options.micro_batch * (problem.options.in_flight * kept + working)
