"""What more cards would buy. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_megatron.api.inputs import Cluster, Model
from hetero_megatron.api.plans import DTYPE, OPTIMIZER
from hetero_megatron.cluster.prices import read_prices
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.report.shop import Offer, format_offers, offers_page
from hetero_megatron.planner.report.shop import shop as search_sets
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.memory.of_plan import moments_of
from hetero_megatron.predictor.cost.cost_options import CostOptions


@dataclass(frozen=True)
class Offers:
    """Sets of cards and what they buy.

    Attributes:
        offers: what is there already, then every set, cheapest first.
        currency, budget: of the prices.
        left_out: cheaper sets that were not looked at.
    """

    offers: tuple[Offer, ...]
    currency: str
    budget: float
    left_out: int

    def __str__(self) -> str:
        return format_offers(self.offers, self.currency, self.left_out, self.budget)

    def page(self) -> str:
        """A bar for each set, and the best ones over their price, as HTML."""
        return offers_page(self.offers, self.currency, str(self))

    def as_json(self) -> dict[str, Any]:
        """As JSON data; seconds, tokens per second, and money in ``currency``."""
        rows = [
            {
                "cards": dict(offer.cards), "cost": offer.cost, "tokens_per_second": offer.tokens_per_second,
                "step_seconds": offer.step_seconds, "gain": offer.gain, "plan": offer.plan, "best": offer.best,
                "without": offer.removes,
            }
            for offer in self.offers
        ]  # fmt: skip
        return {"currency": self.currency, "budget": self.budget, "left_out": self.left_out, "offers": rows}


def shop(
    model: Model | str, cluster: Cluster, cards: Sequence[str], prices: str | os.PathLike[str], budget: float, *,
    seq_length: int, global_batch_size: int, dtype: str = DTYPE, optimizer: str = OPTIMIZER, fp8: Fp8 | None = None,
    micro_batch_size: int | None = None, recompute: str | None = None, context: str = "auto", offload: str = "auto",
    offload_activations: str = "auto", memory_margin: float = CostOptions.margin,
    progress: Callable[[str], None] | None = None,
) -> Offers:  # fmt: skip
    """The best plan with every set of more cards that the budget allows, in hosts of their own.

    Args:
        cluster: what is there already; new hosts are joined by its link between nodes.
        cards: kinds, by the names of the catalogue.
        prices: a file: ``{currency: EUR, cards: {RTX4090: 1800}, host: 2500, per_host: 4}``.
        budget: in that currency.
        The others are those of :func:`hetero_megatron.plan`; no further schedules are looked for.

    Raises:
        UserError: a card without a price, a budget that buys none, a cluster without a link for new hosts.
    """
    shapes = (model if isinstance(model, Model) else Model(model)).stretched(seq_length)
    space = SearchSpace(
        micro_batch_sizes=None if micro_batch_size is None else (micro_batch_size,), recompute=recompute,
        context=context, offload=offload, offload_activations=offload_activations, more_schedules="never",
    )  # fmt: skip
    costs = CostOptions(margin=memory_margin, moments=moments_of(optimizer), muon=optimizer == "muon", fp8=fp8)
    options = SearchOptions(dtype=dtype, space=space, costs=costs)
    problem = PlanningProblem(shapes.spec, cluster.described, seq_length, global_batch_size, options)
    problem.check()
    price_list = read_prices(prices)
    offers, left_out = search_sets(problem, list(cards), price_list, budget, progress=progress)
    return Offers(tuple(offers), price_list.currency, budget, left_out)
