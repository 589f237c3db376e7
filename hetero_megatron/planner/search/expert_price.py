"""What a division of the experts of one stage costs: its micro-batches and, at the end of a step, the exchange of the
gradients and parameters of replicated experts and the optimizer's work."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hetero_megatron.planner.search.expert_replicas import Intervals, Price
from hetero_megatron.plans import Stage
from hetero_megatron.plans.canonical import ExpertGroup, ExpertMember
from hetero_megatron.plans.routing import layer_kinds, layer_loads
from hetero_megatron.predictor.cost.link_model import Flow
from hetero_megatron.predictor.cost.operator_cost import Operators
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.spec.expert_load import expert_elements


class DivisionPrice:
    """Prices of divisions of the experts of a stage whose ranks are one expert group of single ranks.

    Args:
        stages: costs of its plan; stage: with any division.
        rounds: micro-batches per step.
    """

    def __init__(self, stages: StageCosts, stage: Stage, rounds: int) -> None:
        assert stages.model.model.moe is not None
        self.stages, self.stage, self.rounds = stages, stage, rounds
        self.costs, self.model, self.moe = stages.model, stages.model.model, stages.model.model.moe
        self.kinds = [
            (popular, count)
            for routed, popular, count in layer_kinds(self.model, stage.layer_indices(), self.costs.options.routing)
            if routed
        ]
        self.layers = sum(count for _, count in self.kinds)
        self.elements = expert_elements(self.model) * self.layers

    def __call__(self, intervals: Intervals) -> Price:
        stage = divided(self.stage, intervals)
        ranks = dict.fromkeys(stage.ranks, 0.0)
        for popular, count in self.kinds:
            for rank, load in layer_loads(self.model, stage, True, popular, self.stages.plan.islands).of.items():
                ranks[rank] += count * sum(self._operators(rank).experts(load))
        end = self._step_end(intervals) / self.rounds
        return Price(self.stages.stage_seconds(stage) + end, end, tuple(ranks.values()))

    def _operators(self, rank: int) -> Operators:
        chip = self.costs.cluster.ranks[rank].chip
        return self.costs.operators(chip, self.costs.computes_in_fp8(self.stage))

    def _step_end(self, intervals: Intervals) -> float:
        """Seconds per step: gradients and parameters of replicas, and the slowest rank's update of its experts."""
        sent: dict[tuple[int, int], float] = defaultdict(float)
        owned_elements = dict.fromkeys(self.stage.ranks, 0.0)
        for expert in range(self.moe.num_experts):
            holders = [r for r, (a, b) in zip(self.stage.ranks, intervals, strict=True) if a <= expert < b]
            for rank in holders:
                owned_elements[rank] += self.elements / len(holders)
                for peer in holders:
                    if peer != rank:
                        sent[rank, peer] += self.elements / len(holders)
        widths = (self.costs.options.gradient_bytes or self.costs.wide, self.costs.item) if sent else ()
        network, group = self.stages.network, [self.stage.ranks]
        travel = sum(network.groups_exchange(_flows(sent, width), group)[0] for width in widths)
        home, offload = self.costs.cluster.group_of, self.stage.optimizer.offload
        flops = {r: self.costs.muon_flops(n) for r, n in owned_elements.items()}
        updates = [self.costs.update_seconds(home(r), round(n), flops[r], offload) for r, n in owned_elements.items()]
        return travel + max(updates)


def _flows(elements: dict[tuple[int, int], float], width: float) -> list[Flow]:
    return [(a, b, n * width) for (a, b), n in elements.items()]


def divided(stage: Stage, intervals: Intervals) -> Stage:
    """The stage with these experts on its ranks, one group."""
    members = tuple(ExpertMember((r,), experts, (1,)) for r, experts in zip(stage.ranks, intervals, strict=True))
    return replace(stage, experts=(ExpertGroup(members),))
