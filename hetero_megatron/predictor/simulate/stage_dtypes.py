"""What the linear modules of each stage of a found plan compute in, where the run has fp8."""

from __future__ import annotations

from dataclasses import replace

from hetero_megatron.plan import Plan, Stage
from hetero_megatron.plan.fp8_checks import stage_fits
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.stage_cost import work_share


def with_dtypes(plan: Plan, costs: CostModel) -> Plan:
    """The plan with ``dtype`` on every stage that has layers: ``fp8`` where its chips and cuts allow it and it makes no
    rank slower (as :meth:`CostModel.in_fp8` has it for templates), else that of the run. Without fp8 the plan itself.
    """
    if costs.options.fp8 is None:
        return plan

    def with_dtype(stage: Stage) -> Stage:
        if not stage.num_layers:
            return stage
        return replace(stage, dtype="fp8" if _pays(stage, plan.seq_length, costs) else costs.dtype)

    return plan.with_stages(with_dtype)


def without_fp8(plan: Plan, dtype: str) -> Plan:
    """The plan whose stages all say that they compute in the ``dtype`` of the run."""
    return plan.with_stages(lambda stage: replace(stage, dtype=dtype) if stage.num_layers else stage)


def _pays(stage: Stage, seq_length: int, costs: CostModel) -> bool:
    fp8 = costs.options.fp8
    assert fp8 is not None
    chips = {rank: costs.cluster.ranks[rank].chip for rank in stage.ranks}
    if any(chip not in costs.rates.fp8 for chip in chips.values()):
        return False
    return stage_fits(stage, seq_length, costs.model, fp8) and all(
        costs.fp8_pays(chips[rank], work_share(costs, unit.tp_split, t), unit.sequences[1] - unit.sequences[0], length)
        for unit in stage.units
        if (length := unit.num_tokens)
        for t, rank in enumerate(unit.ranks)
    )
