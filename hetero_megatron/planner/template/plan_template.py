"""Plan templates: pipelines and stages over groups of equal chips, without ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hetero_megatron.schedule import generate
from hetero_megatron.schedule import in_flight as alive


@dataclass(frozen=True)
class StageTemplate:
    """A stage of ``dp`` TP groups of ``tp`` chips each, all of one device group.

    Args:
        group: index of the device group.
        first: number of recomputed layers when ``recompute="first"``.
        offload: the optimizer is kept in host memory.
        away: so many first layers have their activations in host memory from forward to backward.
        share: weight of each rank in the division of optimizer states among all holders.
    """

    group: int
    tp: int
    dp: int
    layers: int = 0
    recompute: str = "none"
    first: int = 0
    offload: bool = False
    share: int = 1
    away: int = 0

    @property
    def chips(self) -> int:
        return self.tp * self.dp

    @property
    def plain(self) -> StageTemplate:
        """The stage with all activations kept on the chip."""
        return replace(self, recompute="none", first=0, away=0)


@dataclass(frozen=True)
class PipelineTemplate:
    """Stages in layer order; ``micro_batch_size`` in sequences."""

    micro_batch_size: int
    stages: tuple[StageTemplate, ...]

    def with_stages(self, changed: Mapping[int, StageTemplate]) -> PipelineTemplate:
        """The pipeline with other stages at these places."""
        return replace(self, stages=tuple(changed.get(s, stage) for s, stage in enumerate(self.stages)))

    def usage(self, groups: int) -> tuple[int, ...]:
        """Chips used of each of ``groups`` device groups."""
        used = [0] * groups
        for stage in self.stages:
            used[stage.group] += stage.chips
        return tuple(used)

    @property
    def chips(self) -> int:
        return sum(stage.chips for stage in self.stages)

    @property
    def plain(self) -> PipelineTemplate:
        """The pipeline with all activations kept on the chips."""
        return replace(self, stages=tuple(stage.plain for stage in self.stages))


@dataclass(frozen=True)
class PipelineReplicas:
    """``copies`` equal pipelines, each with ``num_micro_batches`` per step."""

    shape: PipelineTemplate
    copies: int
    num_micro_batches: int

    @property
    def sequences(self) -> int:
        return self.copies * self.shape.micro_batch_size * self.num_micro_batches


@dataclass(frozen=True)
class PlanTemplate:
    """A plan over device groups; ``order``: "stage" or "pipeline", how pipelines are placed on nodes
    (:mod:`placement`)."""

    parts: tuple[PipelineReplicas, ...]
    schedule: str = "1f1b"
    order: str = "stage"

    @property
    def pipelines(self) -> int:
        return sum(part.copies for part in self.parts)

    @property
    def sequences(self) -> int:
        return sum(part.sequences for part in self.parts)

    def usage(self, groups: int) -> tuple[int, ...]:
        used = [0] * groups
        for part in self.parts:
            for g, n in enumerate(part.shape.usage(groups)):
                used[g] += part.copies * n
        return tuple(used)

    def with_part(self, p: int, part: PipelineReplicas) -> PlanTemplate:
        """The plan with other pipelines as part ``p``."""
        return replace(self, parts=(*self.parts[:p], part, *self.parts[p + 1 :]))

    def on_groups(self, groups: Sequence[int]) -> PlanTemplate:
        """The same template on other device groups; ``groups[g]``: the new index of group g."""

        def moved(shape: PipelineTemplate) -> PipelineTemplate:
            return replace(shape, stages=tuple(replace(s, group=groups[s.group]) for s in shape.stages))

        return replace(self, parts=tuple(replace(part, shape=moved(part.shape)) for part in self.parts))

    def merged(self) -> PlanTemplate:
        """Equal parts merged, in the order of first appearance; may change the placement."""
        counts: dict[tuple[PipelineTemplate, int], int] = {}
        for part in self.parts:
            key = (part.shape, part.num_micro_batches)
            counts[key] = counts.get(key, 0) + part.copies
        return replace(self, parts=tuple(PipelineReplicas(s, n, m) for (s, m), n in counts.items() if n))

    def joined(self) -> PlanTemplate:
        """Equal neighbouring parts merged, which keeps the placement."""
        parts: list[PipelineReplicas] = []
        for part in self.parts:
            if parts and (parts[-1].shape, parts[-1].num_micro_batches) == (part.shape, part.num_micro_batches):
                part = replace(part, copies=parts.pop().copies + part.copies)
            parts.append(part)
        return replace(self, parts=tuple(parts))


@lru_cache(maxsize=4096)
def in_flight(schedule: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose activations are alive at once, as counted by ``schedule.in_flight``;
    extrapolated linearly above ``2 x stages`` micro-batches."""
    simulated = 2 * stages
    if micro_batches <= simulated:
        return alive(generate(schedule, stages, micro_batches))
    rows = zip(*(in_flight(schedule, stages, n) for n in (simulated - 1, simulated)))
    return tuple(b + (b - a) * (micro_batches - simulated) for a, b in rows)


def describe(shape: PipelineTemplate, chips: Sequence[str]) -> str:
    """Text such as ``A100 tp4 x3 [10,10,12] > V100 tp2 dp2 [4]``: runs of equal stages with their layers."""
    runs: list[tuple[tuple[int, int, int], list[StageTemplate]]] = []
    for stage in shape.stages:
        key = (stage.group, stage.tp, stage.dp)
        if runs and runs[-1][0] == key:
            runs[-1][1].append(stage)
        else:
            runs.append((key, [stage]))
    words = []
    for (group, tp, dp), stages in runs:
        word = chips[group] + (f" tp{tp}" if tp > 1 else "") + (f" dp{dp}" if dp > 1 else "")
        counts = [s.layers for s in stages]
        layers = (
            f"{len(counts)}x{counts[0]}" if len(counts) > 3 and len(set(counts)) == 1 else ",".join(map(str, counts))
        )
        recompute = {s.recompute for s in stages} - {"none"}
        optimizer_shares = sorted({s.share for s in stages} - {1})
        away, offloaded = sum(s.offload for s in stages), dict.fromkeys(min(s.away, s.layers) for s in stages)
        words.append(
            f"{word} [{layers}]"
            + (f" recompute {'/'.join(sorted(recompute))}" if recompute else "")
            + (f" optimizer share {'/'.join(map(str, optimizer_shares))}" if optimizer_shares else "")
            + ("" if not away else " offload" if away == len(stages) else f" offload {away} of {len(stages)}")
            + (f" activations of {'/'.join(map(str, offloaded))} layers in host memory" if any(offloaded) else "")
        )
    return " > ".join(words)
