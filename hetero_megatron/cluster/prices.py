"""Prices of cards, and which sets of them a budget allows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hetero_megatron.cluster.catalogue import CHIPS, Chip
from hetero_megatron.cluster.cluster import Cluster, NodeGroup
from hetero_megatron.cluster.subset import fresh_name
from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import did_you_mean
from hetero_megatron.utils.yaml_document import read_document

MOST = 1e12
COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of one kind in a set


@dataclass(frozen=True)
class Prices:
    """What cards cost, in ``currency``.

    Attributes:
        cards: price of one, by chip.
        host: price of a new host; per_host: cards that it takes.
    """

    currency: str
    cards: Mapping[str, float]
    host: float = 0.0
    per_host: int = 8

    def cost(self, cards: Mapping[str, int]) -> float:
        """Of a set of cards, with hosts of their own."""
        hosts = sum(math.ceil(count / self.per_host) for count in cards.values())
        return sum(self.cards[chip] * count for chip, count in cards.items()) + hosts * self.host


def read_prices(path: str | os.PathLike[str]) -> Prices:
    """``{currency: EUR, cards: {RTX4090: 1800}, host: 2500, per_host: 4}``; the last two may be left out.

    Raises:
        UserError: names the key, an unknown chip, or a price in another currency.
    """
    keys = read_document(path).mapping(("currency", "cards", "host", "per_host"), required=("currency", "cards"))
    currency = keys["currency"].text()
    cards = {}
    for name, entry in keys["cards"].any_mapping().items():
        if isinstance(entry.value, str):  # "1800 USD" beside EUR
            entry.fail(f"a number of {currency} was expected", accepted=f"every price in {currency}")
        cards[name] = entry.number(1e-6, MOST)
        if name not in CHIPS:
            entry.fail(f"no such card{did_you_mean(name, CHIPS)}", accepted=", ".join(CHIPS))
    host = keys["host"].number(0, MOST) if "host" in keys else Prices.host
    per_host = keys["per_host"].integer(1, 64) if "per_host" in keys else Prices.per_host
    return Prices(currency, cards, host, per_host)


def affordable(prices: Prices, kinds: Sequence[str], budget: float, most: int) -> tuple[list[dict[str, int]], int]:
    """(sets of cards of these kinds, cheapest first; how many more there are).

    Where the budget allows more than ``most``, the dearest of them are taken.

    Raises:
        UserError: a kind without a price, or a budget below the cheapest card.
    """
    for kind in kinds:
        if kind not in prices.cards:
            raise UserError(f"has no price{did_you_mean(kind, prices.cards)}", field="--shop", value=kind,
                            accepted=", ".join(prices.cards))  # fmt: skip
    affordable = list(_sets(prices, kinds, budget))
    if not affordable:
        cheapest = min(prices.cost({kind: 1}) for kind in kinds)
        accepted = f"at least {cheapest:g} {prices.currency}"
        raise UserError("buys no card", field="--budget", value=budget, accepted=accepted)
    affordable.sort(key=prices.cost)
    return affordable[-most:], max(0, len(affordable) - most)


def _sets(prices: Prices, kinds: Sequence[str], budget: float) -> Iterator[dict[str, int]]:
    for counts in product(COUNTS, repeat=len(kinds)):
        cards = {kind: count for kind, count in zip(kinds, counts, strict=True) if count}
        if cards and prices.cost(cards) <= budget:
            yield cards


def with_cards(cluster: Cluster, cards: Mapping[str, int], per_host: int) -> Cluster:
    """The cluster with these cards in new hosts of at most ``per_host``.

    Raises:
        UserError: the cluster has no link between any two nodes that new hosts could have.
    """
    if cluster.inter_node is None:
        raise UserError("missing: new hosts need a link", field="links.inter_node", where=cluster.file,
                        accepted="bandwidth and latency between nodes")  # fmt: skip
    for chip, count in cards.items():
        described: Chip = cluster.chips.get(chip, CHIPS[chip])
        full, remainder = divmod(count, per_host)
        for hosts, size in ((full, per_host), (1, remainder)):
            if hosts and size:
                group = NodeGroup(fresh_name(f"new-{chip.lower()}", cluster), hosts, chip, size)
                cluster = replace(cluster, nodes=(*cluster.nodes, group), chips={**cluster.chips, chip: described})
    return cluster
