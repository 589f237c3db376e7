"""The flags that balance the load of experts -> Balancing."""

from __future__ import annotations

from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.plan import Plan
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.moe import Balancing

_FLAGS = (
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate", "routing_stats",
)  # fmt: skip


def build_balancing(args: Arguments, spec: ModelSpec, plan: Plan) -> Balancing:
    """What the flags ask for; says what the loss that is printed includes.

    Raises:
        UserError: a coefficient is missing or negative, or the model cannot be balanced so.
    """
    if spec.moe is None:
        for key in _FLAGS:
            if key in args.given and args[key] not in (False, "none"):
                raise flag_error(key, args[key], "the model has no mixture of experts")
        return Balancing()
    kind, coefficient = args["moe_router_load_balancing_type"], args["moe_aux_loss_coeff"]
    if kind == "aux_loss" and coefficient:
        _check_aux_loss(plan)
    if kind == "seq_aux_loss" and coefficient is None:
        problem = f"missing: --moe-router-load-balancing-type {kind} needs it"
        raise flag_error("moe_aux_loss_coeff", None, problem, "a number, e.g. 1e-4")
    moves = args["moe_router_enable_expert_bias"]
    if moves and not spec.moe.score_bias:
        problem, other = "the router of this model has no bias", "--moe-router-load-balancing-type seq_aux_loss"
        raise flag_error("moe_router_enable_expert_bias", True, problem, other)
    if moves and spec.lora is not None:
        problem = "the router's bias belongs to the base model, which adapters leave as it is"
        raise flag_error("moe_router_enable_expert_bias", True, problem)
    found = Balancing(
        coefficient or 0.0, args["moe_z_loss_coeff"] or 0.0, args["moe_router_bias_update_rate"] if moves else 0.0
    )
    args.notices.append(found.describe(spec.moe))
    return found


def _check_aux_loss(plan: Plan) -> None:
    """Megatron's aux_loss is of a rank's tokens of a micro-batch: the sequence loss, where those are a sequence."""
    key = "moe_router_load_balancing_type"
    loss = "aux_loss is of each micro-batch, so another plan would train otherwise"
    other = "seq_aux_loss; or --micro-batch-size 1 without tensor and context parallelism, where the two are the same"
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for unit in stage.units:
                rows = unit.sequences[1] - unit.sequences[0]
                reason = f"a rank has {rows} sequences of a micro-batch" if rows > 1 else (
                    f"tensor parallelism {unit.tp} divides a sequence" if unit.tp > 1 else
                    "context parallelism divides a sequence" if unit.num_tokens < plan.seq_length else ""
                )  # fmt: skip
                if reason:
                    raise flag_error(key, "aux_loss", f"{loss}: here {reason}", other)
