"""A lower bound on the time of any context layout, from the chips' speeds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.context.problem import ContextProblem


def speed_bound(problem: ContextProblem) -> float:
    """Lower bound (s) on a micro-batch: work is divided freely and nothing is communicated. A linear program: every
    member divides its time between matrix products and attention. In the optimum the members that are relatively best
    at attention do attention."""
    members, layers, tokens = problem.members, problem.layers, float(problem.seq_length)
    runs = problem.options.forwards
    linear, attention = token_seconds(problem)
    order = np.argsort(attention / linear)
    a, p = 1 / attention[order], 1 / linear[order]  # tokens per second, of each kind of work
    low, high = 0.0, tokens * float(linear.min() + attention.min())
    for _ in range(200):
        seconds = (low + high) / 2
        done = np.cumsum(a) * seconds
        k = int(np.searchsorted(done, tokens))
        if k == len(a):
            low = seconds
            continue
        left = (done[k] - tokens) / a[k]  # seconds left for products of the member that does both
        products = p[k + 1 :].sum() * seconds + p[k] * left
        low, high = (seconds, high) if products < tokens else (low, seconds)
        if high - low <= 1e-12 * high:
            break
    host = runs * min(m.layer_seconds for m in members) + min(m.layer_backward_seconds for m in members)
    return max(low, layers * host)


def token_seconds(problem: ContextProblem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """([members] seconds of one token's matrix products including TP collectives, [members] of its attention), each on
    one member alone."""
    members, layers = problem.members, problem.layers
    runs, again = problem.options.forwards, problem.options.core_again
    linear_work = layers * (runs + 2) * problem.linear_flops + 3 * problem.head_flops
    attention_work = layers * problem.pair_flops * problem.model.num_heads
    linear = [linear_work / m.gemm_flops + layers * (runs + 1) * m.token_seconds for m in members]
    attention = [attention_work * (runs + again + m.attention_backward) / m.attention_flops for m in members]
    return np.array(linear, np.float64), np.array(attention, np.float64)
