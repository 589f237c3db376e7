"""The certificate: a step time that no plan of the search space can beat under the same rates.

*Enumeration* (small clusters): the smallest lower bound over all combinations of pipelines that were enumerated.

*Prices* (large clusters): a Lagrangian bound. Every chip of group g gets a price. P(q) is the least price of a pipeline
that computes q sequences within T seconds. If no pipeline computes more than r sequences per unit of price within T, no
plan computes more than r x (price of all chips) sequences, so a larger batch needs more than T. By duality this holds
for *any* prices; good prices make it tight. P(q) comes from a dynamic program over (stages counted from the end, layers
covered) with three relaxations, each in favour of the pipelines: transfers, synchronisation and optimizer take no time,
optimizer states are divided among all chips, and the stages before a stage are as fast as the fastest chip.

*Work* (:mod:`context_certificate`): the speeds of all chips alone, for any plan.

:func:`assumptions` states what a bound covers; the report prints it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.stage_table import MANY_REPLICAS, StageKind, per_layer
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.template.plan_template import StageTemplate
from hetero_megatron.planner.template.search_space import SearchSpace, batch_sizes, options, tp_degrees
from hetero_megatron.planner.time_budget import ShouldStop, never
from hetero_megatron.spec import ModelSpec
from hetero_megatron.utils.cached_method import cached_method

Floats = NDArray[np.float64]
MOST_INNER = 8  # inner data parallel that the bound by prices covers
STEPS = 9


@dataclass(frozen=True)
class LowerBound:
    """No plan has a shorter step than ``seconds``; ``method``: "enumeration", "prices" or "work"."""

    seconds: float
    method: str

    def reached(self, step_seconds: float) -> float:
        """Share of the tokens per second of the bound that a plan reaches, at most 1."""
        return min(1.0, self.seconds / step_seconds)

    def gap(self, step_seconds: float) -> float:
        """Optimality gap of a plan: ``step_seconds / seconds - 1`` (inf without a bound)."""
        return step_seconds / self.seconds - 1 if self.seconds > 0 else math.inf


class _PriceBound:
    """The bound by prices for one set of prices; P(q) for every micro-batch size."""

    def __init__(
        self,
        scorer: TemplateScorer,
        model: ModelSpec,
        batch: int,
        space: SearchSpace,
        enumerated: bool,
        should_stop: ShouldStop,
    ) -> None:
        self.scorer, self.model, self.batch, self.space = scorer, model, batch, space
        self.enumerated, self.should_stop = enumerated, should_stop
        self.pool, self.tables = scorer.pool, scorer.tables
        self.sizes = batch_sizes(space, batch)
        self.depth = _most_stages(scorer, model)
        self.options = {b: self._options(b) for b in self.sizes}
        self.prices = self._rates()

    def _options(self, size: int) -> list[StageTemplate]:
        found = []
        for g, group in enumerate(self.pool.groups):
            every = group.per_node <= 4 or self.enumerated
            found += [o for o in options(self.pool, g, self.model, self.space, size, every) if o.dp <= MOST_INNER]
        return found

    def seconds(self, option: StageTemplate, size: int, head: bool) -> Floats:
        """[in flight, layers] seconds of an inner stage (``head``: the last stage), with states divided among the most
        replicas that there can be."""
        # The enumeration allows unequal shares of states, down to none, and smaller buckets than assumed here.
        replicas = MANY_REPLICAS if self.enumerated else max(1, self.pool.chips // option.dp)
        kind = StageKind(
            option.group, option.tp, option.dp, size, False, head, replicas, self.space.recompute,
            self.space.offload == "always", not self.enumerated,
        )  # fmt: skip
        return self.tables.table(kind).seconds

    @cached_method
    def rising(self, size: int) -> tuple[list[Floats], list[Floats]]:
        """(last stage, inner stage): :meth:`seconds` of every option, made non-decreasing in the number of layers."""
        tables = [[self.seconds(o, size, head)[:, ::-1] for o in self.options[size]] for head in (True, False)]
        last, inner = ([np.minimum.accumulate(t, axis=1)[:, ::-1] for t in of_kind] for of_kind in tables)
        return last, inner

    def per_layer(self, option: StageTemplate, size: int) -> float:
        """Least seconds of one layer and micro-batch."""
        return per_layer(self.seconds(option, size, False)[0])

    def _rates(self) -> Floats:
        """Initial prices [groups]: best layers x sequences per second of a chip, scaled to at most 1."""
        rates = np.zeros(len(self.pool.groups))
        for size, found in self.options.items():
            for o in found:
                per = self.per_layer(o, size)
                if np.isfinite(per) and per > 0:
                    rates[o.group] = max(rates[o.group], size / (per * o.chips))
        return rates / max(rates.max(), 1e-300)

    def price(self, size: int, counts: Floats, limit: float, most: Floats) -> Floats:
        """Least price of a pipeline that computes ``counts`` [n] micro-batches within ``limit`` seconds.

        Returns:
            [n]; inf where there is no pipeline of a price below ``most`` [n].
        """
        layers, found, answer = self.model.num_layers, self.options[size], np.full(len(counts), np.inf)
        fastest = min((self.per_layer(o, size) for o in found), default=math.inf)
        if math.isinf(fastest):  # not even one layer fits anywhere
            return answer
        behind = np.arange(layers, -1, -1)  # layers not covered yet
        # [n, covered]: seconds per micro-batch left to the stage that completes the covered layers, as it cannot start
        # before the layers in front of it are done. Rounded up, which keeps the bound valid.
        time_ = (limit - behind * fastest) / counts[:, None] * (1 + 1e-12)
        tables = self.rising(size)
        own = np.array([o.chips * self.prices[o.group] for o in found])[:, None, None]
        # Least price of one layer of one micro-batch: a stage of c layers has limit / m seconds for them.
        shares = [float((table[0, 1:] / np.arange(1, layers + 1)).min()) for table in tables[1]]
        each = min(s * price for s, price in zip(shares, own[:, 0, 0]) if s < math.inf) * (1 - 1e-9) / limit
        best = np.full((len(counts), layers + 1), np.inf)  # by layers covered, never falling
        best[:, 0] = 0.0
        rows = np.arange(len(counts))
        for k in range(1, self.depth + 1):
            most_layers = np.stack(
                [of_option[k - 1].searchsorted(time_[rows], "right") - 1 for of_option in tables[k > 1]]
            )  # [option, n, covered]
            before = np.clip(layers - behind - most_layers, 0, layers)
            cost = np.where(most_layers >= (k > 1), best[np.arange(len(rows))[None, :, None], before] + own, np.inf)
            # Covering more layers at the same price is never worse.
            best = np.minimum.accumulate(cost.min(axis=0)[:, ::-1], axis=1)[:, ::-1]
            answer[rows] = np.minimum(answer[rows], best[:, layers])
            enough = np.minimum(answer, most)[rows, None]
            alive = (best + counts[rows, None] * behind * each < enough).any(axis=1)
            rows, best = rows[alive], best[alive]
            if not len(rows):
                break
        return answer

    def rate(self, limit: float, enough: float) -> float:
        """The most sequences per unit of price that a pipeline computes within ``limit`` seconds. Stops early once it
        is known to exceed ``enough``; inf (nothing is ruled out) when the time budget is over."""
        intervals = [
            (size, float(a), float(b)) for size in self.sizes for a, b in _intervals(max(1, self.batch // size))
        ]
        worst = 0.0
        while intervals:
            again: list[tuple[int, float, float]] = []
            for size in self.sizes:
                mine = [(a, b) for s, a, b in intervals if s == size]
                if not mine:
                    continue
                if self.should_stop():
                    return math.inf
                least = max(worst, enough)
                caps = np.array([size * b / least for _, b in mine]) * (1 + 1e-9)
                prices = self.price(size, np.array([a for a, _ in mine]), limit, caps)
                for (a, b), price in zip(mine, prices.tolist()):
                    if not np.isfinite(price):
                        continue
                    high = size * b / price if price > 0 else math.inf
                    if high <= max(worst, enough):
                        continue
                    if b - a < 1 or b / a < 1.004:
                        worst = max(worst, high)
                    else:
                        middle = math.floor(math.sqrt(a * b))
                        again += [(size, a, float(middle)), (size, float(middle + 1), b)]
            if worst > enough and not math.isinf(worst):
                return worst  # already above enough: this limit cannot be ruled out
            intervals = [row for row in again if row[1] <= row[2]]
        return worst

    def max_saved_seconds(self) -> float:
        """Upper bound on the seconds by which the first backward of a step is shorter than the others (it writes
        gradients, the others add)."""
        found = [0.0]
        for size, rows in self.options.items():
            for o in rows:
                fits = np.flatnonzero(np.isfinite(self.seconds(o, size, False)[0]))
                if len(fits):
                    whole = StageTemplate(o.group, o.tp, o.dp, int(fits[-1]))
                    found.append(self.scorer.saved_seconds(whole, True, True))
        return max(found)

    def possible(self, limit: float) -> bool:
        """Whether the prices do not rule out a step of ``limit`` seconds."""
        everything = float(self.prices @ np.array(self.pool.counts, float))
        enough = self.batch / everything * (1 - 1e-9)  # what a plan of the whole batch on all chips needs
        return self.rate(limit, enough) > enough


def _intervals(most: int) -> list[tuple[int, int]]:
    found, a = [], 1
    while a <= most:
        b = min(most, max(a, int(a * 1.6)))
        found.append((a, b))
        a = b + 1
    return found


def _most_stages(scorer: TemplateScorer, model: ModelSpec) -> int:
    return min(scorer.tables.depth, model.num_layers + 2, scorer.pool.chips)


def assumptions(
    method: str,
    scorer: TemplateScorer,
    model: ModelSpec,
    batch: int,
    space: SearchSpace,
    enumerated: bool,
) -> tuple[str, ...]:
    """The plans that a bound by ``method`` covers and what it assumes about their costs, as sentences for the report;
    ``enumerated`` as in :func:`price_bound`."""
    rates = "rates as given, chips steady (no jitter)"
    if method == "work":
        return "all plans; only products of layers and attention take time, at each chip's best rate", rates
    pool = scorer.pool
    degrees = {
        t
        for g, group in enumerate(pool.groups)
        for t in tp_degrees(pool, g, model, space, group.per_node <= 4 or enumerated)
    }
    stages = f"backwards not split, one chunk of layers per stage, equal TP of {_listed(degrees)}"
    if method == "enumeration":
        taken = (
            f"gpipe up to {scorer.tables.depth} micro-batches, pipelines placed on nodes stage by stage or one "
            "after the other"
        )
    else:
        inner = f"inner DP up to {MOST_INNER}" if space.inner_dp else "no inner DP"
        stages += f", {inner}, at most {_most_stages(scorer, model)} stages"
        taken = "transfers, synchronisation and optimizer take no time, optimizer states divided among all chips"
    return (
        f"stages of one chip type, {stages}",
        f"micro-batches of {_listed(batch_sizes(space, batch))}, one level of recompute per stage"
        + (f" ({space.recompute})" if space.recompute else ""),
        "every backward whole and after its forward, no virtual chunks",
        "optimizers on the chips" + (" or in host memory" if space.offload == "always" else ""),
        "no context groups",
        taken,
        rates,
    )


def _listed(numbers: Iterable[int]) -> str:
    *most, last = (str(n) for n in sorted(numbers))
    return f"{', '.join(most)} or {last}" if most else last


def price_bound(
    scorer: TemplateScorer, model: ModelSpec, batch: int, space: SearchSpace, step_seconds: float,
    enumerated: bool = False, should_stop: ShouldStop = never,
) -> LowerBound:  # fmt: skip
    """The bound by prices; bisection between 0 and ``step_seconds``, the step time of a known plan.

    Args:
        enumerated: cover everything that the complete enumeration may choose: any TP degree, unequal shares of states.
        should_stop: end early; the bound found by then is still valid.
    """
    prices = _PriceBound(scorer, model, batch, space, enumerated, should_stop)
    low, high = 0.0, step_seconds
    for step in range(STEPS):
        middle = high * 0.9 if step == 0 else (low + high) / 2
        if prices.possible(middle):
            high = middle
        else:
            low = middle
        if should_stop() or high - low < 2e-3 * high:
            break
    return LowerBound(max(0.0, low - prices.max_saved_seconds()), "prices")
