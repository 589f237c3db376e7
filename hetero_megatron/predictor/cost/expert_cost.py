"""Seconds of routed experts on one chip, without links: products of rows with their expert's matrices, the permutation
of tokens, and what exchanging tokens costs the chip itself.

The router and what all tokens share are parts of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hetero_megatron.predictor.cost.rates import ChipRates
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.expert_load import INDEX, ExpertLoad
from hetero_megatron.spec.lora import MLP_TARGETS

Seconds = tuple[float, float]  # forward, backward
Gemm = Callable[[float, float, float], float]
MOVED = 4  # times that a token is read or written on its way out of or into a message: packed, unpacked


def expert_seconds(
    model: ModelSpec, rates: ChipRates, item: int, fingerprint: str, load: ExpertLoad, gemm: Gemm
) -> Seconds:
    """(forward, backward) of one mixture-of-experts layer: as measured for this model at the nearest number of columns,
    else by operators.

    Args:
        gemm: seconds of a product [m, k] x [k, n].
    """
    measured = [row for row in rates.experts if row[0] == fingerprint]
    modelled = _by_operators(model, rates, item, load, gemm)
    if not measured or not load.columns:
        return modelled
    nearest = min(measured, key=lambda row: abs(math.log(row[1] / load.columns)))
    per_row = 1.0
    if nearest[1] != load.columns:
        per_row = _row_work(model, rates, item, load.columns, gemm) / _row_work(model, rates, item, nearest[1], gemm)
    amounts = [load.experts, load.rows * per_row]
    if load.members > 1:
        amounts += load.members, load.exchanged, load.hops
    forward, backward = (sum(n * nearest[2 + 2 * i + way] for i, n in enumerate(amounts)) for way in (0, 1))
    return forward, backward


def _row_work(model: ModelSpec, rates: ChipRates, item: int, columns: float, gemm: Gemm) -> float:
    rows = 256.0
    one_expert = ExpertLoad(1.0, 0.0, 0.0, 0.0, rows, 1, columns, 1)
    return sum(_by_operators(model, rates, item, one_expert, gemm))


def _by_operators(model: ModelSpec, rates: ChipRates, item: int, load: ExpertLoad, gemm: Gemm) -> Seconds:
    h, expert_rows = model.hidden_size, load.rows / load.experts if load.experts else 0.0
    matrices = len(model.mlp_projections)
    to_columns, to_rows = gemm(expert_rows, load.columns, h), gemm(expert_rows, h, load.columns)
    products = load.experts * ((matrices - 1) * to_columns + to_rows)
    # Read and written: rows on their way in and out (2 h, 3 h), the activation (3 columns; without a gate 2), tokens of
    # messages.
    moved = load.rows * (5 * h + matrices * load.columns)
    if load.members > 1:
        moved += MOVED * h * load.exchanged
    small = item * moved / rates.bytes_per_second + _adapters(model, rates, item, load, gemm)
    elements = model.in_few_bits * matrices * load.experts * load.columns * h
    dequantised = elements * (1 + item) / rates.bytes_per_second  # read in 8 bits, and written as products have them
    return products + small + dequantised, (2 if model.lora is None else 1) * products + 2 * small + dequantised


def _adapters(model: ModelSpec, rates: ChipRates, item: int, load: ExpertLoad, gemm: Gemm) -> float:
    """Seconds of the experts' adapters in forward: two narrow products each, their addition, and with DoRA scaling."""
    if model.lora is None or not load.experts:
        return 0.0
    h, rank, expert_rows, seconds = model.hidden_size, model.lora.rank, load.rows / load.experts, 0.0
    for name in (name for name in model.lora.targets if name in MLP_TARGETS):
        k, n = (load.columns, h) if name == "down_proj" else (h, load.columns)
        seconds += load.experts * (gemm(expert_rows, rank, k) + gemm(expert_rows, n, rank))
        seconds += (3 + 2 * model.lora.dora) * item * load.rows * n / rates.bytes_per_second
    return seconds


def token_bytes(model: ModelSpec, item: int) -> tuple[int, int, int, int]:
    """Bytes of one token in each exchange of a mixture-of-experts layer: to the experts (with weights and numbers) and
    back in forward, to the experts and back (with the weights' gradients) in backward."""
    assert model.moe is not None
    h, weights = model.hidden_size * item, model.moe.top_k * max(item, 4)
    return h + weights + INDEX * model.moe.top_k, h, h, h + weights
