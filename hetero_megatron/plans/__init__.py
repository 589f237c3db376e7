"""Plans: which ranks hold which layers, heads, tokens and sequences. No torch."""

from hetero_megatron.plans.canonical import (
    Interval,
    KeyValues,
    Optimizer,
    Pipeline,
    Place,
    Plan,
    Recompute,
    Stage,
    Unit,
)
from hetero_megatron.plans.capabilities import supports
from hetero_megatron.plans.dump import dump_yaml, format_plan, to_dict
from hetero_megatron.plans.schema import load_plan, plan_from_dict
from hetero_megatron.plans.shares import (
    activation_layout,
    all_ranks,
    idle_ranks,
    locate,
    micro_batch_sizes,
    pipeline_samples,
    pipeline_shares,
    stage_at,
    token_intervals,
    unit_at,
    unit_sequences,
)
from hetero_megatron.plans.validate import validate

__all__ = [
    "Interval",
    "KeyValues",
    "Optimizer",
    "Pipeline",
    "Place",
    "Plan",
    "Recompute",
    "Stage",
    "Unit",
    "activation_layout",
    "all_ranks",
    "dump_yaml",
    "format_plan",
    "idle_ranks",
    "load_plan",
    "locate",
    "micro_batch_sizes",
    "pipeline_samples",
    "pipeline_shares",
    "plan_from_dict",
    "stage_at",
    "supports",
    "to_dict",
    "token_intervals",
    "unit_at",
    "unit_sequences",
    "validate",
]
