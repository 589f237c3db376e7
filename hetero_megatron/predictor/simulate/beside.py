"""A step beside a second model that only runs forward: on its own ranks, one batch ahead, or on the same ones, before
the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetero_megatron.cluster import Cluster
from hetero_megatron.plans import Plan
from hetero_megatron.plans.forward_only import ForwardRole
from hetero_megatron.plans.memory.forward_only import with_role
from hetero_megatron.plans.memory.memory_report import over_host, over_limit
from hetero_megatron.plans.memory.of_plan import format_communicators
from hetero_megatron.predictor.cost.cost_options import CostOptions, source_of
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.role_prediction import RolePrediction, RolloutPrediction
from hetero_megatron.predictor.simulate.stage_cost import PreparedPlan
from hetero_megatron.predictor.simulate.step import Prediction, StepSimulator, predict
from hetero_megatron.spec import ModelSpec


@dataclass(frozen=True)
class RoleCosts:
    """What a role's forward takes on a cluster.

    Attributes:
        seconds: of its forwards over a batch; busy: by rank, those of them in which the rank computes.
    """

    seconds: float
    busy: Mapping[int, float]
    costs: CostModel


def role_costs(role: ForwardRole, cluster: Cluster, dtype: str, options: CostOptions) -> RoleCosts:
    """One price for runs, predictions and searches."""
    compiled = role.compiled
    forward_options = CostOptions(
        reference=role.forwards, margin=options.margin, logits_bytes=options.logits_bytes, loss_words=role.loss_words[1]
    )
    costs = CostModel(compiled.spec, cluster, compiled.plan.seq_length, dtype, forward_options)
    forward = StepSimulator(compiled.plan, costs, PreparedPlan(compiled))
    busy = {rank: role.forwards * seconds for rank, seconds in forward.computing_forward.items()}
    return RoleCosts(forward.reference_seconds, busy, costs)


def predict_beside(
    plan: Plan, model: ModelSpec, cluster: Cluster, dtype: str, options: CostOptions, role: ForwardRole,
    prepared: PreparedPlan | None = None,
) -> Prediction:  # fmt: skip
    """One step of a plan with a role. With ranks of its own a step is as long as the longer of both: the role's forward
    (while what it said is sent), or the arrival of what was said and then the step.

    Args:
        options, prepared: as of :func:`~hetero_megatron.predictor.simulate.step.predict`.

    Raises:
        UserError: the plan does not match the cluster, or rates or links are missing.
    """
    price, options = role_costs(role, cluster, dtype, options), replace(options, loss_words=role.loss_words[0])
    arrival = price.costs.links.exchange(role.sends(plan))
    sent = arrival.seconds + arrival.latency
    before = sent if role.apart else price.seconds
    prediction = predict(plan, model, cluster, dtype, options=replace(options, role_seconds=before), prepared=prepared)
    alone = prediction.step_seconds - before
    if role.apart and price.seconds > alone + sent:
        waits = replace(options, role_seconds=price.seconds - alone)
        prediction = predict(plan, model, cluster, dtype, options=waits, prepared=prepared)
    said = RolePrediction(role.name, role.compiled.plan.ranks, price.seconds, alone, role.apart, sent)
    if not role.apart:
        busy = {rank: seconds + price.busy[rank] for rank, seconds in prediction.busy.items()}
        prediction = replace(prediction, busy=busy)
    return with_role_ranks(prediction, plan, role, price, dtype, cluster, said)


def with_role_ranks(
    prediction: Prediction, plan: Plan, role: ForwardRole, price: RoleCosts, dtype: str, cluster: Cluster,
    said: RolePrediction | RolloutPrediction,
) -> Prediction:  # fmt: skip
    """``prediction`` of the ranks of ``plan`` with the role's memory there, and with its own ranks."""
    logits_bytes, busy = price.costs.options.logits_bytes, dict(prediction.busy)
    limits, chips = dict(prediction.limits), dict(prediction.chips)
    assumed, dtypes = dict(prediction.assumed), dict(prediction.dtypes)
    memory = with_role(prediction.memory, plan, role, dtype, logits_bytes, cluster)
    for rank in role.compiled.plan.ranks if role.apart else ():
        chip = chips[rank] = cluster.ranks[rank].chip
        rates, limits[rank], busy[rank] = price.costs.chip_rates(chip), price.costs.memory_limit(chip), price.busy[rank]
        memory[rank] = replace(memory[rank], overhead=int(rates.overhead_bytes))
        if not rates.calibrated:
            assumed[chip] = source_of(cluster.chips[chip], dtype)
        if dtypes:
            dtypes[rank] = dtype
    over = over_limit(memory, limits, chips) + over_host(memory, cluster)
    communicators = tuple(format_communicators(sorted(memory), cluster))
    return replace(
        prediction, memory=memory, limits=limits, chips=chips, busy=busy, assumed=assumed, dtypes=dtypes, over=over,
        communicators=communicators, role=said,
    )  # fmt: skip
