"""What a stage takes more, or less, because the layers that it recomputes whole are not like its average one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hetero_megatron.plans.canonical import Recompute, Stage
from hetero_megatron.predictor.cost.layer_cost import UnitSeconds
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import layers_cost_unlike, layers_differ


def with_first_layers(
    seconds_of: Callable[[Stage], UnitSeconds], stage: Stage, spec: ModelSpec, length: int
) -> UnitSeconds:
    """``seconds_of(stage)``, with ``again`` of the first layers, where these alone are recomputed."""
    seconds, count = seconds_of(stage), stage.recomputed
    alike = not layers_differ(spec) and not layers_cost_unlike(spec, length)
    if alike or not 0 < count < stage.num_layers:
        return seconds
    runs, missing = [], count
    for a, b in stage.layers:
        runs.append((a, min(b, a + missing)))
        missing -= runs[-1][1] - a
    first = replace(stage, layers=tuple(runs), recompute=Recompute())
    return replace(seconds, again=seconds_of(first).layer[0] - seconds.layer[0])
