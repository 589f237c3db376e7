"""Seconds of ranks of a concrete context stage: outside of their attention core, and of a layer of linear attention, in
which all members compute their runs of tokens at once, then states go along the chain of runs, one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero_megatron.plans import Stage, Unit
from hetero_megatron.plans.context_plan import StageContext
from hetero_megatron.plans.linear_attention import passed_bytes
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.modelled_operators import LINEAR_BACKWARD
from hetero_megatron.predictor.cost.operator_cost import Operators, heads_and_columns
from hetero_megatron.spec import ModelSpec, shares
from hetero_megatron.spec.flops import TP_COLLECTIVES, linear_layers

Pair = tuple[float, float]  # forward, backward


class MemberCost:
    """Prices of ranks of context stages."""

    def __init__(self, model: CostModel) -> None:
        self.model, self.network = model, model.links

    def outside_core(self, stage: Stage, unit: Unit, t: int, spec: ModelSpec) -> tuple[Operators, Pair, Pair]:
        """Of TP rank ``t``, in a layer of ``spec``: (operators, seconds without attention core, TP collectives and
        elementwise recompute included, factor that corrects the core's)."""
        rows, tokens, chip = unit.sequences[1] - unit.sequences[0], unit.num_tokens, self.network.ranks[unit.ranks[t]]
        operators = self.model.operators(chip.chip, self.model.computes_in_fp8(stage), spec)
        columns = heads_and_columns(self.model.model, unit.tp_split, t)[1]
        outside, ratio = operators.split(columns, rows, tokens)
        onward, back = operators.exchange(columns, rows, tokens, self.tp_collective(unit)[0])
        backward = outside[1] + TP_COLLECTIVES * back
        if stage.recompute.kind == "elementwise":
            backward += operators.elementwise(columns, rows, tokens) + TP_COLLECTIVES / 2 * onward
        return operators, (outside[0] + TP_COLLECTIVES * onward, backward), ratio

    def floor(self, operators: Operators, unit: Unit) -> Pair:
        """Least seconds of a layer, in which the host starts it."""
        host = TP_COLLECTIVES * self.tp_collective(unit)[1]
        return operators.rates.layer_seconds + host, operators.rates.layer_backward_seconds + host

    def tp_collective(self, unit: Unit) -> tuple[float, float]:
        """(seconds of one gather or scatter-sum of a TP member, seconds of it on the host)."""
        size = unit.micro_batch_tokens * self.model.model.hidden_size * self.model.item
        return self.network.tp_exchange(unit.ranks, size)


def linear_layer_seconds(
    prices: MemberCost, stage: Stage, context: StageContext, units: Sequence[Unit], spec: ModelSpec
) -> Pair:
    """Of one inner replica; ``spec``: of such layers alone, or of MLPs alone, which pass nothing. Backward includes
    recompute of a part of it."""
    rows = units[0].sequences[1] - units[0].sequences[0]
    passed_forward, passed_backward = _passing(prices, context, rows) if linear_layers(spec) else (0.0, 0.0)
    again = stage.recompute.kind == "selective"
    forward, backward, floor = 0.0, 0.0, (0.0, 0.0)
    for unit in units:
        later = sum(b - a for a, b in unit.tokens if a)  # tokens with a state before their run
        for t in range(unit.tp):
            operators, outside, _ = prices.outside_core(stage, unit, t, spec)
            share = _heads(prices.model.model, unit, t)
            carried = operators.carried(share, rows, later)
            forward = max(forward, outside[0] + carried)
            recomputed = operators.linear_attention(share, rows, unit.num_tokens) + carried if again else 0.0
            backward = max(backward, outside[1] + LINEAR_BACKWARD * carried + recomputed)
            least = prices.floor(operators, unit)
            floor = max(floor[0], least[0]), max(floor[1], least[1])
    backward += passed_backward + (passed_forward if again else 0.0)
    return max(forward + passed_forward, floor[0]), max(backward, floor[1])


def _heads(spec: ModelSpec, unit: Unit, t: int) -> float:
    """Share of the heads of linear attention on TP rank ``t``."""
    a, b = shares(spec, unit.tp_split)[t].value_heads
    return (b - a) / spec.delta.value_heads if spec.delta is not None else 0.0


def _passing(prices: MemberCost, context: StageContext, rows: int) -> Pair:
    """(forward, backward) seconds in which what convolutions look back at, and then states, pass."""
    looked_at, *states = passed_bytes(context, prices.model.item, prices.model.wide)
    forward, backward = (
        _exchange(prices, looked_at, rows, "all_to_all", back)
        + sum(_exchange(prices, volumes, rows, None, back) for volumes in states)
        for back in (False, True)
    )
    return forward, backward


def _exchange(
    prices: MemberCost, volumes: Mapping[tuple[int, int], int], rows: int, collective: str | None, back: bool
) -> float:
    flows = [(b, a, float(size * rows)) if back else (a, b, float(size * rows)) for (a, b), size in volumes.items()]
    price = prices.network.exchange(flows, collective=collective)
    host = prices.network.busiest_host(ends for a, b in volumes for ends in ((a, b), (b, a)))
    return price.seconds + price.latency + host
