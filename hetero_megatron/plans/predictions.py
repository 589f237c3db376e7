"""Where a plan has the modules that predict further tokens: on the stage with the head, after its layers. A last stage
with no layers has them to itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.fields import Source, stages
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec


def predictions_fit(plan: Plan, spec: ModelSpec, source: Source) -> None:
    """Refuse plans in which modules have nothing to predict, or that do with them what is not known."""
    depth = spec.mtp_layers
    if depth >= plan.seq_length:
        raise source.error(
            f"{plural(depth, 'module')} would predict tokens beyond a sequence of {plan.seq_length}",
            "--mtp-num-layers", depth, f"at most {plan.seq_length - 1}",
        )  # fmt: skip
    for path, _, stage in stages(plan):
        for key, feature in (("weights", "divides its weights"), ("activations", "has activations in host memory")):
            if stage.head and getattr(stage, key) is not None:
                raise source.error(
                    f"a stage that {feature} knows no modules that predict further tokens", f"{path}.{key}", "a choice",
                    f"none on the stage with the head, or a model without modules (it has {depth})",
                )  # fmt: skip
