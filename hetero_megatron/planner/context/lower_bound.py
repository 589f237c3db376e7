"""A lower bound on the time of any context layout, from the chips' speeds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.context.problem import ContextProblem

Floats = NDArray[np.float64]


def work_seconds(linear: Floats, attention: Floats, tokens: float) -> float:
    """Least seconds in which members together do the work of ``tokens`` tokens, divided freely and without
    communication. A linear program: every member divides its time between matrix products and attention. In the optimum
    the members that are relatively best at attention do attention.

    Args:
        linear, attention: [members] seconds of one token's matrix products, and of its attention, on one member alone.
    """
    order = np.argsort(attention / linear)
    a, p = 1 / attention[order], 1 / linear[order]  # tokens per second, of each kind of work
    low, high = 0.0, tokens * float(linear.min() + attention.min())
    for _ in range(200):
        seconds = (low + high) / 2
        attended = np.cumsum(a) * seconds
        k = int(np.searchsorted(attended, tokens))
        if k == len(a):
            low = seconds
            continue
        seconds_left = (attended[k] - tokens) / a[k]  # seconds left for products of the member that does both
        products = p[k + 1 :].sum() * seconds + p[k] * seconds_left
        low, high = (seconds, high) if products < tokens else (low, seconds)
        if high - low <= 1e-12 * high:
            break
    return low


def speed_bound(problem: ContextProblem) -> float:
    """Lower bound (s) on a micro-batch of a stage."""
    members, layers, options = problem.members, problem.layers, problem.options
    runs, core_again = options.forwards, options.core_again
    linear_work = layers * (runs + 2) * problem.linear_flops + 3 * problem.head_flops
    attention_work = layers * problem.pair_flops * problem.model.num_heads
    linear = [linear_work / m.gemm_flops + layers * (runs + 1) * m.token_seconds for m in members]
    attention = [attention_work * (runs + core_again + m.attention_backward) / m.attention_flops for m in members]
    host = runs * min(m.layer_seconds for m in members) + min(m.layer_backward_seconds for m in members)
    return max(work_seconds(np.array(linear), np.array(attention), float(problem.seq_length)), layers * host)
