"""How fast the chips of a cluster are, one by one: what shares and orders begin with before anything is searched."""

from __future__ import annotations

from hetero_megatron.predictor.cost.cost_options import StageChoice
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.utils.cached_method import cached_method


class ChipSpeeds:
    """Of the cluster and model of ``costs``."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def of(self, rank: int) -> float:
        """Sequences per second of a layer, forward, on the chip of a rank."""
        place = self._costs.cluster.ranks[rank]
        return self._of_group(place.group, place.chip)

    @cached_method
    def _of_group(self, group: str, chip: str) -> float:
        return 1 / self._costs.forward_seconds(StageChoice(chip, 1, 1, 1, False, False, home=group), 1)
