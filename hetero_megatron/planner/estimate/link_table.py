"""Link prices between the groups of a device pool."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.link_model import LinkPrice
from hetero_megatron.utils.cached_method import cached_method


class LinkTable:
    """:class:`LinkPrice` of collectives per (source group, target group, same_node)."""

    def __init__(self, pool: DevicePool, costs: CostModel) -> None:
        self.pool, self.model = pool, costs.links

    @cached_method
    def between(self, g: int, h: int, same_node: bool = False) -> LinkPrice | None:
        """The price of a link between two nodes of these groups, or inside one node; None where there is no such link.
        """
        groups = self.pool.groups
        there = self.pool.link(g, h, same_node) is not None and all(groups[i].ranks for i in (g, h))
        return self.model.link(groups[g].home, groups[h].home, same_node, "all_to_all") if there else None

    @cached_method
    def best(self, g: int, same_node: bool) -> tuple[float, float]:
        """(least seconds per byte of a node's port in either direction, least latency in seconds) over all links of a
        group."""
        others: Sequence[int] = [g] if same_node else range(len(self.pool.groups))
        out, into = (
            [price for price in found if price is not None]
            for found in zip(*((self.between(g, h, same_node), self.between(h, g, same_node)) for h in others))
        )
        rates = [*(price.out for price in out), *(price.into for price in into)]
        return min(rates, default=math.inf), min((price.alpha for price in (*out, *into)), default=math.inf)
