"""The certificate: a step time that no plan of the search space can beat under the same rates.

*Enumeration* (small clusters): the least lower bound over all combinations of pipelines that the search went through.

*Prices* (large clusters): give every chip of group g a price. A pipeline that computes q sequences within T seconds
uses chips worth at least P(q); if no pipeline computes more than r sequences per unit of price within T, no plan
computes more than r x (price of all chips) sequences, so a batch above that needs more than T. P comes from a
dynamic program over (stages from the end, layers covered), which is exact but for three things that only help the
pipelines: transfers, synchronisation and optimizer take no time, states are divided among all chips, and the stages
before one are as fast as the fastest chip. Lagrangian duality makes this valid for *any* prices; good ones make it
tight.

*Work* (``context_certificate.py``): what the speeds of all chips allow, whatever the plan.

What a bound holds for is stated in the report (:func:`assumptions`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.stage_table import NEARLY_NONE, StageKind, per_layer
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.template.plan_template import StageTemplate
from hetero_megatron.planner.template.search_space import SearchSpace, StageOption, batch_sizes, options, tp_degrees
from hetero_megatron.planner.time_budget import Late, never
from hetero_megatron.spec import ModelSpec

Floats = NDArray[np.float64]
MOST_INNER = 8  # inner data parallel that the bound by prices covers
STEPS = 9


@dataclass(frozen=True)
class LowerBound:
    """No plan has a shorter step than ``seconds``."""

    seconds: float
    method: str

    def gap(self, step_seconds: float) -> float:
        """How much faster than ``step_seconds`` a plan could be at most, as a share of the bound."""
        return step_seconds / self.seconds - 1 if self.seconds > 0 else math.inf


class _PriceBound:
    """P(q) for all micro-batch sizes, at given prices."""

    def __init__(
        self, scorer: TemplateScorer, model: ModelSpec, batch: int, space: SearchSpace, enumerated: bool, late: Late
    ) -> None:
        self.scorer, self.model, self.batch, self.space = scorer, model, batch, space
        self.enumerated, self.late = enumerated, late
        self.pool, self.tables = scorer.pool, scorer.tables
        self.sizes = batch_sizes(space, batch)
        self.depth = _most_stages(scorer, model)
        self.options = {b: self._options(b) for b in self.sizes}
        self.prices = self._rates()
        self._rising: dict[int, tuple[list[Floats], list[Floats]]] = {}

    def _options(self, size: int) -> list[StageOption]:
        found = []
        for g, group in enumerate(self.pool.groups):
            every = group.per_node <= 4 or self.enumerated
            found += [o for o in options(self.pool, g, self.model, self.space, size, every) if o.dp <= MOST_INNER]
        return found

    def seconds(self, option: StageOption, size: int, head: bool) -> Floats:
        """[in flight, layers] seconds of an inner stage (or the last one), at the memory of the most replicas."""
        # Where all is enumerated, shares of states may be unequal, down to none, and buckets smaller than assumed.
        replicas = NEARLY_NONE if self.enumerated else max(1, self.pool.chips // option.dp)
        kind = StageKind(
            option.group, option.tp, option.dp, size, False, head, replicas, self.space.recompute,
            self.space.offload == "always", not self.enumerated,
        )  # fmt: skip
        return self.tables.table(kind).seconds

    def rising(self, size: int) -> tuple[list[Floats], list[Floats]]:
        """:meth:`seconds` of last and of inner stages for all options, so that more layers never take less."""
        if size not in self._rising:
            tables = [[self.seconds(o, size, head)[:, ::-1] for o in self.options[size]] for head in (True, False)]
            last, inner = ([np.minimum.accumulate(t, axis=1)[:, ::-1] for t in of_kind] for of_kind in tables)
            self._rising[size] = last, inner
        return self._rising[size]

    def per_layer(self, option: StageOption, size: int) -> float:
        """Least seconds of one layer and micro-batch."""
        return per_layer(self.seconds(option, size, False)[0])

    def _rates(self) -> Floats:
        """Layers and sequences per second of a chip at its best: the first guess of prices."""
        rates = np.zeros(len(self.pool.groups))
        for size, found in self.options.items():
            for o in found:
                per = self.per_layer(o, size)
                if np.isfinite(per) and per > 0:
                    rates[o.group] = max(rates[o.group], size / (per * o.chips))
        return rates / max(rates.max(), 1e-300)

    def price(self, size: int, counts: Floats, limit: float, most: Floats) -> Floats:
        """Least price of a pipeline that computes ``counts`` micro-batches within ``limit`` seconds; inf: none below
        ``most``, if any."""
        layers, found, answer = self.model.num_layers, self.options[size], np.full(len(counts), np.inf)
        fastest = min((self.per_layer(o, size) for o in found), default=math.inf)
        if math.isinf(fastest):  # not even one layer fits anywhere
            return answer
        behind = np.arange(layers, -1, -1)  # layers that are not covered yet
        # A stage that is the first to have t layers covered starts when the others are done at the soonest, and has
        # this for a micro-batch: [n, covered]; a little more than less, so that rounding only helps.
        time_ = (limit - behind * fastest) / counts[:, None] * (1 + 1e-12)
        tables = self.rising(size)
        own = np.array([o.chips * self.prices[o.group] for o in found])[:, None, None]
        # A stage of c layers has limit / m for them, so for a layer of a micro-batch it costs this at least.
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
            # Covering more layers for the same price is never worse.
            best = np.minimum.accumulate(cost.min(axis=0)[:, ::-1], axis=1)[:, ::-1]
            answer[rows] = np.minimum(answer[rows], best[:, layers])
            enough = np.minimum(answer, most)[rows, None]
            alive = (best + counts[rows, None] * behind * each < enough).any(axis=1)
            rows, best = rows[alive], best[alive]
            if not len(rows):
                break
        return answer

    def rate(self, limit: float, enough: float) -> float:
        """The most sequences per unit of price that any pipeline computes within ``limit``; stops below ``enough``, and
        where time is up with what rules nothing out."""
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
                if self.late():
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
                return worst  # the limit is already long enough
            intervals = [row for row in again if row[1] <= row[2]]
        return worst

    def most_saved(self) -> float:
        """Seconds that the first backward of a step takes less than the others, at most: of the largest stages."""
        found = [0.0]
        for size, rows in self.options.items():
            for o in rows:
                fits = np.flatnonzero(np.isfinite(self.seconds(o, size, False)[0]))
                if len(fits):
                    whole = StageTemplate(o.group, o.tp, o.dp, int(fits[-1]))
                    found.append(self.scorer.saved_seconds(whole, True, True))
        return max(found)

    def possible(self, limit: float) -> bool:
        """Whether the prices do not rule out that the batch is done within ``limit``."""
        everything = float(self.prices @ np.array(self.pool.counts, float))
        enough = self.batch / everything * (1 - 1e-9)  # one pipeline of all chips and the whole batch has just this
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
    """What plans a bound by ``method`` is over, and what they are taken to cost; ``enumerated`` as in
    :func:`price_bound`."""
    rates = "rates as given, chips steady (no jitter)"
    if method == "work":
        return "all plans; only products of layers and attention take time, at each chip's best rate", rates
    pool = scorer.pool
    degrees = {
        t
        for g, group in enumerate(pool.groups)
        for t in tp_degrees(pool, g, model, space, group.per_node <= 4 or enumerated)
    }
    stages = f"equal TP of {_listed(degrees)}"
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
    enumerated: bool = False, late: Late = never,
) -> LowerBound:  # fmt: skip
    """By prices; ``step_seconds``: of a plan that is known, so the bound is not above it.

    Args:
        enumerated: over all that the complete enumeration may choose: any TP degree, unequal shares of the states.
        late: when to stop; what was ruled out by then still is.
    """
    prices = _PriceBound(scorer, model, batch, space, enumerated, late)
    low, high = 0.0, step_seconds
    for step in range(STEPS):
        middle = high * 0.9 if step == 0 else (low + high) / 2
        if prices.possible(middle):
            high = middle
        else:
            low = middle
        if late() or high - low < 2e-3 * high:
            break
    return LowerBound(max(0.0, low - prices.most_saved()), "prices")
