"""Seconds of a rank of a concrete context stage outside of its attention core."""

from __future__ import annotations

from hetero_megatron.plans import Stage, Unit
from hetero_megatron.predictor.cost.layer_cost import TP_COLLECTIVES, CostModel
from hetero_megatron.predictor.cost.operator_cost import Operators, heads_and_columns
from hetero_megatron.spec import ModelSpec

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
