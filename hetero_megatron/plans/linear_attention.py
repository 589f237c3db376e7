"""Where a plan may have layers of linear attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_megatron.plans.canonical import Plan, Stage
from hetero_megatron.plans.context_plan import has_context
from hetero_megatron.plans.fields import Source, stages

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec


def has_linear(spec: ModelSpec, stage: Stage) -> bool:
    """Whether some layer of the stage, modules that predict further tokens among them, has linear attention."""
    numbers = (*stage.layer_indices(), *(spec.predictions if stage.head else ()))
    return spec.delta is not None and any(spec.layer(i).linear for i in numbers)


def states_are_whole(plan: Plan, spec: ModelSpec, source: Source) -> None:
    """Refuse context groups on stages with linear attention."""
    for path, _, stage in stages(plan):
        if has_context(stage, plan.seq_length) and has_linear(spec, stage):
            raise source.error(
                "the states of linear attention do not pass from one member of a context group to the next",
                f"{path}.context", f"{len(stage.units)} members",
                "no context groups on stages with such layers (on those with attention alone they may be)",
            )  # fmt: skip
