"""Memory of a stage's communicators, beyond what is set aside for them on every chip."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.placement import StageId
from hetero_megatron.planner.template.plan_template import StageTemplate
from hetero_megatron.plans.memory.of_plan import library
from hetero_megatron.predictor.cost.layer_cost import CostModel


class StageCommunicators:
    """Of the stages on one pool."""

    def __init__(self, costs: CostModel, pool: DevicePool) -> None:
        chips = [costs.cluster.chips[group.chip] for group in pool.groups]
        self.vendors = [library(chip) for chip in chips]
        self.memory = [chip.communicator for chip in chips]

    def counted(self, stages: Sequence[StageTemplate], s: int, reducing: Iterable[int]) -> int:
        """Bytes on a rank of stage ``s`` of a pipeline beyond what is set aside.

        Args:
            reducing: ranks of each group in which gradients of the stage are reduced (:meth:`reducing`).
        """
        stage = stages[s]
        vendor, memory = self.vendors[stage.group], self.memory[stage.group]
        if not vendor:
            return 0
        neighbours = [stages[i] for i in (s - 1, s + 1) if 0 <= i < len(stages)]
        pairs = sum(2 * other.tp * other.dp for other in neighbours if self.vendors[other.group] == vendor)
        groups = [size for size in (stage.tp, *reducing) if size > 1]
        allocated = memory.bytes(len(groups) + pairs, sum(groups) - len(groups) + pairs)
        return max(0, allocated - memory.least)

    def of_equal_pipelines(self, stages: Sequence[StageTemplate], s: int, replicas: float) -> int:
        """:meth:`counted` of ``replicas`` equal pipelines."""
        return self.counted(stages, s, [int(replicas * stages[s].chips)] if len(stages) > 1 else [])

    def reducing(
        self, holders: Iterable[Collection[StageId]], stages: Mapping[StageId, StageTemplate],
        ranks: Mapping[StageId, int],
    ) -> dict[StageId, list[int]]:  # fmt: skip
        """By stage, ranks of the groups of one vendor in which its gradients are reduced.

        Args:
            holders: of every range of layers, the stages that hold it.
            ranks: of each stage.
        """
        sizes: dict[StageId, list[int]] = {stage_id: [] for stage_id in stages}
        all_ranks = sum(ranks.values())
        for sharers in {frozenset(row) for row in holders}:
            count = sum(ranks[stage_id] for stage_id in sharers)
            # The group of all ranks is the world's, which is gloo's.
            if count < all_ranks and len({self.vendors[stages[stage_id].group] for stage_id in sharers}) == 1:
                for stage_id in sharers:
                    sizes[stage_id].append(count)
        return sizes


def most_peers(mine: int, theirs: int) -> int:
    """Of a line that is cut evenly into ``mine`` parts, and into ``theirs``: most of the latter that touch one of the
    former."""
    return max(-(-(i + 1) * theirs // mine) - i * theirs // mine for i in range(mine))
