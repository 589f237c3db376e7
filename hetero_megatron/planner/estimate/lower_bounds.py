"""Lower bounds on the step of any plan, with or without context groups, from the speeds of all chips alone.

Every layer's matrix products and every visible query-key pair are computed once in forward and again in backward by
some chip. The least time in which all chips together do this work is a linear program with a known optimum
(:func:`work_seconds`; where layers are of several kinds, the work of each is some of its own, and its dual is taken);
recompute, communication, bubbles, head, embedding, host and optimizer can only add to it. It takes milliseconds for any
number of chips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.operator_cost import Operators
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import layers_by_kind

ROWS, DEGREES, PARTS = (1, 4, 32), (1, 2, 4, 8), (1, 2, 8, 64)
TURNS, STEP = 400, 0.3  # of a search for prices of kinds of work, of which relative changes shrink with time

Floats = NDArray[np.float64]
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
    seconds, counts = _of_any([best[g.chip] for g in scorer.pool.groups]), [g.chips for g in scorer.pool.groups]
    if seconds.shape[1] != 2:
        return batch * costs.seq_length * _least_seconds(seconds, counts)
    linear, attention = np.repeat(seconds, counts, axis=0).T
    return batch * work_seconds(linear, attention, float(costs.seq_length))


def _of_any(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Of [chips, kinds of work] seconds those of work that there is."""
    seconds = np.array(rows)
    return seconds[:, seconds.any(axis=0)]


def _least_seconds(seconds: NDArray[np.float64], counts: Sequence[int]) -> float:
    """A lower bound, mostly within 1 % of the best one, on the seconds in which groups of ``counts`` chips together do
    one token's work of each kind; ``seconds``: [groups, kinds of work] of one chip alone. As in :func:`most_tokens` any
    prices give one; these rise for work of which the chips that earn most by it do too little, and fall for other."""
    rows, chips = np.arange(len(seconds)), np.array(counts, np.float64)
    starts = seconds / seconds.sum(axis=1, keepdims=True)
    prices, least = starts[0], math.inf
    for start in starts:
        if (speed := float(chips @ (start / seconds).max(axis=1))) < least:
            prices, least = start, speed
    for turn in range(1, TURNS + 1):
        earned = prices / seconds
        work = earned.argmax(axis=1)
        speed = float(chips @ earned[rows, work])
        least = min(least, speed)
        done = np.bincount(work, chips / seconds[rows, work], seconds.shape[1])  # tokens per second of each work
        prices = prices * np.exp(-STEP / math.sqrt(turn) * np.minimum(done / speed - 1, 2.0))
        prices /= prices.sum()
    return 1 / least


def most_tokens(costs: CostModel, chips: Sequence[str], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Upper bound on tokens per second for many clusters at once. Linear programming duality: at any relative price of
    the kinds of work (matrix products and attention, of each kind of layer) a chip earns most by doing only one, and
    the minimum over prices of the total earnings bounds the throughput.

    Args:
        chips: chip types.
        counts: [rows, types] chips of each type.

    Returns:
        [rows] tokens per second.
    """
    seconds = _of_any([_token_seconds(costs.model, costs, chip) for chip in chips])
    # Of two kinds of work the minimum is at a price at which some chip type earns the same with either.
    prices = seconds / seconds.sum(axis=1, keepdims=True)
    earned = (prices[:, None] / seconds).max(axis=2)  # [prices, types]
    return np.asarray((counts @ earned.T).min(axis=1))


def _token_seconds(model: ModelSpec, costs: CostModel, chip: str) -> tuple[float, ...]:
    """Least seconds of one token's matrix products, and of its attention, forward and backward through all layers; of
    each kind of layer in turn."""
    seconds: list[float] = []
    for kind, share in layers_by_kind(model):
        seconds += (share * model.num_layers * each for each in _layer_seconds(kind, costs, chip))
    return tuple(seconds)


def _layer_seconds(kind: ModelSpec, costs: CostModel, chip: str) -> tuple[float, float]:
    """The same of one layer."""
    model, dtypes = None if kind == costs.model else kind, {False, chip in costs.rates.fp8}
    all_operators: list[Operators] = [costs.operators(chip, fp8, model) for fp8 in dtypes]
    gemm = core = back = math.inf  # seconds of a token
    for rows in ROWS:
        for tp in DEGREES:
            for part in PARTS:
                length = max(1, costs.seq_length // part)
                for operators in all_operators:
                    linear, ratio = operators.split(1 / tp, rows, length)
                    tokens = rows * length / tp
                    gemm = min(gemm, linear[0] / tokens, linear[1] / tokens / 2)
                    attention = operators.attention(1 / tp, rows, costs.seq_length)
                    tokens = rows * costs.seq_length / tp
                    core = min(core, attention[0] * ratio[0] / tokens)
                    back = min(back, attention[1] * ratio[1] / tokens)
    return 3 * gemm, core + back


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
