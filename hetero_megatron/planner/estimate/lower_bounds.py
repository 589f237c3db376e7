"""Lower bounds on the step of any plan, with or without context groups, from the speeds of all chips alone.

Every layer's matrix products and every visible query-key pair are computed once in forward and again in backward by
some chip. The least time in which all chips together do this work is a linear program with a known optimum
(:func:`work_seconds`); recompute, communication, bubbles, head, embedding, host and optimizer can only add to it. It
takes milliseconds for any number of chips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.context.lower_bound import work_seconds
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.operator_cost import Operators
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import layer_attention_flops, layer_matmul_flops, mean_attention_pairs

ROWS, DEGREES, PARTS = (1, 4, 32), (1, 2, 4, 8), (1, 2, 8, 64)

ASSUMPTIONS = (
    "all plans; only products of layers and attention take time, at each chip's best rate",
    "rates as given, chips steady (no jitter)",
)


@dataclass(frozen=True)
class LowerBound:
    """No plan has a shorter step than ``seconds``; ``method``: what it is computed from, "work"."""

    seconds: float
    method: str = "work"

    def reached(self, step_seconds: float) -> float:
        """Share of the tokens per second of the bound that a plan reaches, at most 1."""
        return min(1.0, self.seconds / step_seconds)

    def gap(self, step_seconds: float) -> float:
        """Optimality gap of a plan: ``step_seconds / seconds - 1`` (inf without a bound)."""
        return step_seconds / self.seconds - 1 if self.seconds > 0 else math.inf


def work_bound(scorer: TemplateScorer, model: ModelSpec, batch: int) -> float:
    """Seconds below which no plan computes ``batch`` sequences."""
    costs = scorer.costs
    best = {group.chip: _token_seconds(model, costs, group.chip) for group in scorer.pool.groups}
    linear, attention = np.array([best[group.chip] for group in scorer.pool.groups for _ in range(group.chips)]).T
    return batch * work_seconds(linear, attention, float(costs.seq_length))


def most_tokens(costs: CostModel, chips: Sequence[str], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Upper bound on tokens per second for many clusters at once. Linear programming duality: at any relative price of
    matrix products and attention a chip earns most by doing only one of the two; the minimum over prices of the total
    earnings bounds the throughput.

    Args:
        chips: chip types.
        counts: [rows, types] chips of each type.

    Returns:
        [rows] tokens per second.
    """
    linear, attention = np.array([_token_seconds(costs.model, costs, chip) for chip in chips]).T
    # The minimum is at a price at which some chip type earns the same with either.
    share = (linear / (linear + attention))[:, None]
    earned = np.maximum(share / linear, (1 - share) / attention)  # [prices, types]
    return np.asarray((counts @ earned.T).min(axis=1))


def _token_seconds(model: ModelSpec, costs: CostModel, chip: str) -> tuple[float, float]:
    """Least seconds of one token's matrix products, and of its attention, forward and backward through all layers."""
    kinds: list[Operators] = [costs.operators(chip, fp8) for fp8 in {False, chip in costs.rates.fp8}]
    flops = layer_matmul_flops(model)
    pairs = layer_attention_flops(model, mean_attention_pairs(model, costs.seq_length))
    gemm = core = back = 0.0
    for rows in ROWS:
        for tp in DEGREES:
            for part in PARTS:
                length = max(1, costs.seq_length // part)
                for operators in kinds:
                    linear, ratio = operators.split(1 / tp, rows, length)
                    work = flops * rows * length / tp
                    gemm = max(gemm, work / linear[0], 2 * work / linear[1])
                    seconds = operators.attention(1 / tp, rows, costs.seq_length)
                    core = max(core, pairs * rows / tp / (seconds[0] * ratio[0]))
                    back = max(back, pairs * rows / tp / (seconds[1] * ratio[1]))
    token_flops = pairs / costs.seq_length
    return model.num_layers * 3 * flops / gemm, model.num_layers * token_flops * (1 / core + 1 / back)
