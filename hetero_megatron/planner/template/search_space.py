"""The choices that the search may make; restricted search spaces define the baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hetero_megatron.cluster.catalogue import Chip
from hetero_megatron.errors import UserError
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import PlanTemplate, StageTemplate
from hetero_megatron.plans import supports
from hetero_megatron.spec import ModelSpec, shares

LONG = 32768  # tokens per sequence from which context groups are tried without being asked for


@dataclass(frozen=True)
class SearchSpace:
    """The open choices. None: every sensible value.

    Args:
        micro_batch_sizes: sequences per micro-batch.
        recompute: one level for all stages.
        inner_dp: stages may split the rows of a micro-batch over several TP groups.
        max_tp: largest TP degree.
        over_nodes: TP groups may span nodes.
        max_pipelines: largest number of pipelines.
        equal_pipelines: no | layers (equal stages, and shares of the batch but for a micro-batch) | copies (the same
            chips and degrees, too): all weights are whole then, as the files of some other runtimes want it.
        shares: pipelines may own unequal shares of the optimizer states where memory is tight (small clusters only).
        context: auto (for long sequences, or where nothing fits otherwise) | always | never: stages of context groups.
        more_schedules: auto (up to 64 chips) | always | never: the best plans are also tried under adaptive schedules.
        schedule_effort: how much longer than by default such schedules and better plans are looked for.
        offload: auto (where nothing fits otherwise) | always | never: optimizers in host memory.
        offload_activations: auto (of chips whose link to the host is known, where that saves 1 % of a step) | always
            (of others, too, whatever it saves) | never: those of layers in host memory, where they do not fit
            otherwise, or where that is faster than to recompute them.
        weights: auto (by room) | equal | never: shares of stages that divide their weights.
    """

    micro_batch_sizes: tuple[int, ...] | None = None
    recompute: str | None = None
    inner_dp: bool = True
    max_tp: int = 16
    over_nodes: bool = True
    max_pipelines: int | None = None
    equal_pipelines: str = "no"
    shares: bool = True
    context: str = "auto"
    offload: str = "auto"
    offload_activations: str = "auto"
    weights: str = "auto"
    more_schedules: str = "auto"
    schedule_effort: float = 1.0

    def allows(self, template: PlanTemplate) -> bool:
        """Whether pipelines are as equal as they have to be."""
        if self.equal_pipelines == "no":
            return True
        parts = template.merged().parts
        stages = {(x.shape.micro_batch_size, *(stage.layers for stage in x.shape.stages)) for x in parts}
        counts = [x.num_micro_batches for x in parts]
        most = 1 if self.equal_pipelines == "copies" else len(parts)
        return len(stages) == 1 and max(counts) - min(counts) <= 1 and len(parts) <= most

    def activations_away(self, chips: Mapping[str, Chip]) -> frozenset[str]:
        """Those of the chip types whose stages may have activations in host memory."""
        if self.recompute is not None or self.offload_activations == "never":
            return frozenset()
        all_types = self.offload_activations == "always"
        return frozenset(name for name, chip in chips.items() if all_types or chip.host_bandwidth is not None)


def tp_degrees(pool: DevicePool, group: int, model: ModelSpec, space: SearchSpace, every: bool) -> tuple[int, ...]:
    """TP degrees to try: inside a node all (``every``) or the divisors of its size, over whole nodes powers of two."""
    size, chips = pool.groups[group].per_node, pool.groups[group].chips
    inside = [t for t in range(1, size + 1) if every or size % t == 0]
    outside = []
    if space.over_nodes and size * pool.groups[group].nodes > size:
        t = 2 * size
        while t <= min(chips, 8):
            outside.append(t)
            t *= 2
    return tuple(t for t in (*inside, *outside) if t <= space.max_tp and _divides(model, t))


def _divides(model: ModelSpec, tp: int) -> bool:
    if tp > model.num_heads:
        return False
    try:
        shares(model, (1,) * tp)
    except UserError:
        return False
    return True


def batch_sizes(space: SearchSpace, batch: int, limit: int = 16) -> tuple[int, ...]:
    """Micro-batch sizes to try, smallest first: all up to 4, then powers of two."""
    if space.micro_batch_sizes is not None:
        return tuple(b for b in space.micro_batch_sizes if b <= batch)
    return tuple(b for b in (1, 2, 3, 4, 8, 16, 32) if b <= min(batch, limit))


def options(
    pool: DevicePool, group: int, model: ModelSpec, space: SearchSpace, size: int, every: bool = True
) -> Iterator[StageTemplate]:
    """Stages of a group, without layers, for micro-batches of ``size`` sequences."""
    chips = pool.groups[group].chips
    for tp in tp_degrees(pool, group, model, space, every):
        for dp in range(1, chips // tp + 1):
            if size % dp == 0 and (dp == 1 or (space.inner_dp and supports("dp_split"))):
                yield StageTemplate(group, tp, dp)


def why_no_context(space: SearchSpace, seq_length: int, fits: bool) -> str:
    """Empty where context groups are tried, else the reason why not; ``fits``: some plan without them fits."""
    if space.context == "never":
        return "not tried: --context never"
    if space.context == "always" or not fits or seq_length >= LONG:
        return ""
    return f"not tried: a sequence of {seq_length} tokens (below {LONG}) fits on one chip or TP group"
