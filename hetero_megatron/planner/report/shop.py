"""What more cards would buy: the best plan for every affordable set, and which sets none beats in price and speed."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero_megatron.cluster.prices import Prices, affordable, with_cards
from hetero_megatron.errors import UserError
from hetero_megatron.html.page import page, section
from hetero_megatron.html.pictures import Bar, Line, bars, curve
from hetero_megatron.planner.problem import PlanningProblem, TimeBudget
from hetero_megatron.planner.report.comparison import choice_text, why_slower
from hetero_megatron.planner.search.driver import SearchResult, search
from hetero_megatron.utils.text import plural

SETS = 20
SECONDS = 5.0  # of one search, at most


@dataclass(frozen=True)
class Offer:
    """A set of cards to buy; none: what is there already.

    Attributes:
        cost: with new hosts.
        tokens_per_second: 0 where the model fits in no plan.
        gain: tokens per second more than what is there does, for a unit of money.
        plan: in words; removes: what slowed the plan on what is there.
        best: no set that costs as much or less is faster.
    """

    cards: Mapping[str, int]
    cost: float
    tokens_per_second: float
    step_seconds: float
    gain: float
    plan: str
    removes: str
    best: bool = False

    @property
    def name(self) -> str:
        return " + ".join(f"{count} x {chip}" for chip, count in self.cards.items()) or "what is there"


def shop(
    problem: PlanningProblem, kinds: list[str], prices: Prices, budget: float, most: int = SETS,
    progress: Callable[[str], None] | None = None,
) -> tuple[list[Offer], int]:  # fmt: skip
    """(what is there, and every affordable set, cheapest first; how many sets were left out).

    Each is searched without further schedules, for at most ``SECONDS``, and is at least as fast as any part of it.

    Raises:
        UserError: a kind without a price, a budget that buys nothing, or no link for new hosts.
    """
    sets, left_out = affordable(prices, kinds, budget, most)
    question = problem.with_space(more_schedules="never")
    today, offers = None, list[Offer]()
    for cards in [{}, *sets]:
        cluster = with_cards(problem.cluster, cards, prices.per_host) if cards else problem.cluster
        searched = _searched(question.on(cluster))
        today = searched if not cards else today
        offers.append(_not_slower(_offer(cards, prices.cost(cards), searched, today), offers))
        if progress is not None:
            progress(f"{offers[-1].name}: {offers[-1].tokens_per_second:,.0f} tokens/s")
    return [replace(offer, best=_unbeaten(offer, offers)) for offer in offers], left_out


def _searched(problem: PlanningProblem) -> SearchResult | None:
    try:
        return search(problem, budget=TimeBudget(SECONDS))
    except UserError:  # it fits in no plan
        return None


def _offer(cards: Mapping[str, int], cost: float, result: SearchResult | None, there: SearchResult | None) -> Offer:
    if result is None:
        return Offer(cards, cost, 0.0, 0.0, 0.0, "fits in no plan", "")
    best = result.best
    tokens = best.prediction.tokens_per_second
    tokens_today = 0.0 if there is None else there.best.prediction.tokens_per_second
    removes = "" if not cards else "it did not fit" if there is None else ""
    if cards and there is not None and tokens > tokens_today:
        removes = why_slower(best, there.best)
    gain = (tokens - tokens_today) / cost if cost else 0.0
    plan = choice_text(best, [group.chip for group in result.pool.groups])
    return Offer(cards, cost, tokens, best.step_seconds, gain, plan, removes)


def _not_slower(offer: Offer, before: Sequence[Offer]) -> Offer:
    """With the plan of a part of the cards where that is faster than what was found in the time."""
    subsets = [o for o in before if all(offer.cards.get(chip, 0) >= count for chip, count in o.cards.items())]
    fastest = max(subsets, key=lambda o: o.tokens_per_second, default=offer)
    if fastest.tokens_per_second <= offer.tokens_per_second:
        return offer
    tokens_today = subsets[0].tokens_per_second
    gain = (fastest.tokens_per_second - tokens_today) / offer.cost
    return replace(
        fastest, cards=offer.cards, cost=offer.cost, gain=gain, plan=f"that of {fastest.name}: {fastest.plan}"
    )


def _unbeaten(offer: Offer, offers: list[Offer]) -> bool:
    return offer.tokens_per_second > 0 and not any(
        rival.tokens_per_second > offer.tokens_per_second and rival.cost <= offer.cost
        or rival.tokens_per_second == offer.tokens_per_second and rival.cost < offer.cost
        for rival in offers
    )  # fmt: skip


def format_offers(offers: Sequence[Offer], currency: str, left: int, limit: float) -> str:
    """As a table; ``limit``: the budget."""
    rows = [("cards", currency, "tokens/s", f"tokens/s more per 1,000 {currency}", "", "without them")]
    for offer in offers:
        gain = f"{1000 * offer.gain:+,.1f}" if offer.cost else ""
        speed = f"{offer.tokens_per_second:,.0f}" if offer.tokens_per_second else "fits in no plan"
        rows.append((offer.name, f"{offer.cost:,.0f}", speed, gain, "best" if offer.best else "", offer.removes))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) if i in (0, 4, 5) else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
             for row in rows]  # fmt: skip
    lines += ["", f"best: nothing that costs as much or less, up to {limit:,.0f} {currency}, is faster"]
    if left:
        lines.append(f"{plural(left, 'cheaper set')} not looked at")
    best_offer = max(offers, key=lambda offer: offer.gain)
    if best_offer.gain > 0:
        lines.append(f"most speed for the money: {best_offer.name}: {best_offer.plan}")
    return "\n".join(lines)


def offers_page(offers: Sequence[Offer], currency: str, text: str) -> str:
    """Self-contained HTML: a bar for each set, and the front of the best ones over their price."""
    front = [offer for offer in offers if offer.best]
    rows = [
        Bar(offer.name, f"{offer.tokens_per_second:,.0f} tokens/s, {offer.cost:,.0f} {currency}",
            ((_BEST if offer.best else _OTHER, offer.tokens_per_second),))
        for offer in offers
    ]  # fmt: skip
    points = [(round(offer.cost), offer.tokens_per_second) for offer in front]
    line = Line("tokens per second of the best sets", points, _BEST)
    heading = "What more cards would buy"
    parts = [f"<h1>{heading}</h1>", bars(rows), section("Speed over price", f"in {currency}"), curve([line], ()),
             section("The table"), f"<pre>{html.escape(text)}</pre>"]  # fmt: skip
    return page(heading, "".join(parts))


_BEST, _OTHER = "#34a06f", "#4c8bf5"
