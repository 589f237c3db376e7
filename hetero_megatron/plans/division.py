"""Which ranks divide a tensor among themselves, and what they keep of it for all pipelines. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hetero_megatron.layout import Layout
from hetero_megatron.plans.canonical import Plan, WeightSharding
from hetero_megatron.spec import LogicalTensor

Groups = tuple[tuple[int, ...], ...]


class Division:
    """Of the tensors of a plan. Equal layouts give the same layouts, however often they are asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._groups: dict[int, tuple[Layout, Groups]] = {}  # by identity of a layout, which is kept alive
        self._only: dict[tuple[int, tuple[int, ...]], tuple[Layout, Layout]] = {}
        self._kept: dict[tuple[int, ...], tuple[Sequence[Layout], Layout]] = {}

    def groups(self, tensor: LogicalTensor, layout: Layout) -> Groups:
        """Holders of one stage each that divide what ``layout`` has: several, or one with its optimizer in host memory,
        of a stage that says so, while no other stage of their pipeline holds it, too. What a mixture has of every
        expert is as the plan divides these."""
        if tensor.per_expert or tensor.by_load:
            return ()
        if id(layout) not in self._groups:
            self._groups[id(layout)] = layout, self._find(layout)
        return self._groups[id(layout)][1]

    def _find(self, layout: Layout) -> Groups:
        holders: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # by pipeline and stage
        for rank in layout.ranks:
            place = self._plan.places[rank]
            holders[place.pipeline][place.stage].append(rank)
        alone = [ranks for by_stage in holders.values() if len(by_stage) == 1 for ranks in by_stage.values()]
        dividing = self._plan.sharding_stages
        return tuple(
            tuple(ranks)
            for ranks in alone
            if ranks[0] in dividing and (len(ranks) > 1 or dividing[ranks[0]].optimizer.offload)
        )

    def weights(self, group: Sequence[int]) -> WeightSharding | None:
        """How a group divides them."""
        return self._plan.sharding_stages[group[0]].weights

    def only(self, layout: Layout, group: tuple[int, ...]) -> Layout:
        """What a group holds."""
        key = id(layout), group
        if key not in self._only:
            self._only[key] = layout, layout.only(group)
        return self._only[key][1]

    def kept(self, layout: Layout, keepers: Sequence[Layout]) -> Layout:
        """What each holder has between uses: of groups that divide it, what ``keepers`` say; of others, all."""
        key = id(layout), *map(id, keepers)
        if key not in self._kept:
            boxes = dict(layout.boxes)
            for group in keepers:
                boxes |= group.boxes
            self._kept[key] = (layout, *keepers), Layout(layout.shape, boxes)
        return self._kept[key][1]
