"""A step of --grpo: answers are sampled before it, on the ranks that train or on a generator's, or during the step
before (--generator-ahead)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hetero_megatron.cluster import Cluster
from hetero_megatron.plans import Plan
from hetero_megatron.plans.canonical import Pipeline
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.forward_only import ForwardRole, weight_moves
from hetero_megatron.plans.memory.forward_only import with_sampling
from hetero_megatron.plans.memory.generator import cache_bytes, sampling_pipeline, sampling_stage
from hetero_megatron.plans.memory.memory_report import over_host, over_limit
from hetero_megatron.plans.shares import pipeline_shares, rank_shares
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.rates import LEAST, LayerRow, Rates, load_rates
from hetero_megatron.predictor.simulate.beside import RoleCosts, with_role_ranks
from hetero_megatron.predictor.simulate.role_prediction import RolloutPrediction
from hetero_megatron.predictor.simulate.stage_cost import PreparedPlan
from hetero_megatron.predictor.simulate.step import Prediction, StepSimulator, predict
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.grpo import Grpo


@dataclass(frozen=True)
class RolloutPrice:
    """Of a pipeline, in seconds.

    Attributes:
        prompts: of a batch of rows, until the first token can be chosen; token: each that follows, of all rows.
        seconds: of all of the pipeline's answers.
    """

    prompts: float
    token: float
    seconds: float


class RolloutCosts:
    """Prices rollouts of a model on a cluster: prompts as a forward, each token as one of sequences of one token, whose
    products are bound by the weights that they read, and the keys and values that attention reads. Prompts fill what
    ``new_tokens`` leave of a sequence, and all answers have so many tokens: the longest rollout that there can be."""

    def __init__(
        self, model: ModelSpec, cluster: Cluster, seq_length: int, dtype: str, margin: float, new_tokens: int
    ) -> None:
        prompt = max(seq_length - new_tokens, 1)
        self._new_tokens, self._mean_length = new_tokens, prompt + new_tokens / 2
        # Of prompts the head is asked about the last token only, which is counted with the others.
        headless = replace(model, vocab_size=1)
        options = CostOptions(reference=1, margin=margin)
        self._prompts = CostModel(headless, cluster, prompt, dtype, options)
        self.costs = CostModel(model, cluster, 1, dtype, options, _of_tokens(load_rates(cluster, dtype)))
        self._priced: dict[tuple[Pipeline, int], tuple[float, float]] = {}

    def pipelines(self, plan: Plan, rows: int | None) -> list[RolloutPrice]:
        """Of each pipeline of ``plan``; ``rows``: answers that one samples at once; None: those of a micro-batch."""
        prices = []
        for pipeline, count in zip(plan.pipelines, pipeline_shares(plan, plan.global_batch_size), strict=True):
            size = min(rows or pipeline.micro_batch_size, max(count, 1))
            prompts, token = self._of_rows(pipeline, size)
            seconds = count // size * (prompts + self._new_tokens * token)
            if rest := count % size:
                a, b = self._of_rows(pipeline, rest)
                seconds += a + self._new_tokens * b
            prices.append(RolloutPrice(prompts, token, seconds))
        return prices

    def _of_rows(self, pipeline: Pipeline, rows: int) -> tuple[float, float]:
        """(seconds of the prompts of some rows, of a token of each)."""
        if (pipeline, rows) not in self._priced:
            token = self._forward(pipeline, rows, self.costs) + self._cache_seconds(pipeline, rows)
            self._priced[pipeline, rows] = self._forward(pipeline, rows, self._prompts), token
        return self._priced[pipeline, rows]

    def _forward(self, pipeline: Pipeline, rows: int, costs: CostModel) -> float:
        length = costs.seq_length
        plan = Plan(length, rows, "1f1b", (sampling_pipeline(pipeline, rows, length),))
        return StepSimulator(plan, costs, PreparedPlan(CompiledPlan(plan, costs.model))).reference_seconds

    def _cache_seconds(self, pipeline: Pipeline, rows: int) -> float:
        """To read keys and values of one token's attention, stage after stage."""
        costs, total = self.costs, 0.0
        for stage in pipeline.stages:
            alone = sampling_stage(stage, rows, 1)
            read = [
                cache_bytes(costs.model, alone, share, rows, round(self._mean_length), costs.item)
                / costs.chip_rates(costs.cluster.ranks[rank].chip).bytes_per_second
                for rank, share in rank_shares(costs.model, alone).items()
            ]  # fmt: skip
            total += max(read)
        return total


def _of_tokens(rates: Rates) -> Rates:
    """For sequences of one token. Of chips of which nothing was measured, products of few rows take as long as their
    weights are read: what share of the peak larger ones reach says nothing of them. What generating a token was
    measured to take counts (``decode_head``: beside its layers, so the embedding is in it, and an action); of what was
    not, layers and heads are on the line through their two smallest sizes, in tokens: what a layer takes however few
    they are lies on it."""
    chips = {}
    for name, chip in rates.chips.items():
        measured = {(row.fingerprint, row.tp) for row in chip.decode_layers}
        nothing = [replace(row, forward=LEAST, backward=LEAST) for row in chip.decode_head]
        heads = [replace(row, forward=max(row.forward - chip.action_seconds, LEAST)) for row in chip.decode_head]
        chips[name] = replace(
            chip, gemm_half=chip.gemm_half if chip.calibrated else 0.0,
            layers=(*chip.layers, *chip.decode_layers, *_few(chip.layers, measured)),
            embed=(*chip.embed, *nothing, *_few(chip.embed, measured)),
            head=(*chip.head, *heads, *_few(chip.head, measured)),
        )  # fmt: skip
    return replace(rates, chips=chips)


def _few(rows: Sequence[LayerRow], without: Collection[tuple[str, float]]) -> list[LayerRow]:
    """Of each model and TP degree two rows of sequences of one token."""
    alike: dict[tuple[str, float], list[LayerRow]] = {}
    for row in (row for row in rows if (row.fingerprint, row.tp) not in without):
        alike.setdefault((row.fingerprint, row.tp), []).append(row)
    found = []
    for measured in alike.values():
        low, *others = sorted(measured, key=lambda row: row.micro_batch_size * row.seq_length)
        size = low.micro_batch_size * low.seq_length
        high = next((row for row in others if row.micro_batch_size * row.seq_length > size), None)
        if high is not None:
            slope = (high.forward - low.forward) / (high.micro_batch_size * high.seq_length - size)
            least = min(max(low.forward - slope * (size - 1), 0.0), low.forward)
            found += [replace(low, micro_batch_size=float(n), seq_length=1, forward=seconds, backward=seconds)
                      for n, seconds in ((1, least), (size, low.forward))]  # fmt: skip
    return found


def predict_rollouts(
    plan: Plan, model: ModelSpec, cluster: Cluster, dtype: str, options: CostOptions, g: Grpo,
    generator: ForwardRole | None, prepared: PreparedPlan | None = None,
) -> Prediction:  # fmt: skip
    """One step of a plan, on average, whose answers are sampled before it, or by a generator that is ahead during it.

    Args:
        generator: None: the ranks that train sample.
        options, prepared: as of :func:`~hetero_megatron.predictor.simulate.step.predict`.

    Raises:
        UserError: the plan does not match the cluster, or rates or links are missing.
    """
    sampling = plan if generator is None else generator.compiled.plan
    costs = RolloutCosts(model, cluster, plan.seq_length, dtype, options.margin, g.max_new_tokens)
    prices = costs.pipelines(sampling, g.rows if generator is None else None)
    rollout, sent = max(price.seconds for price in prices), 0.0
    if generator is not None:
        compiled = prepared.compiled if prepared is not None else CompiledPlan(plan, model)
        sent = weight_seconds(compiled, generator.compiled, costs.costs) * min(1.0, g.iterations / g.sync_every)
    before = sent if g.ahead else rollout + sent
    first = replace(options, role_seconds=before / g.iterations)
    prediction = predict(plan, model, cluster, dtype, options=first, prepared=prepared)
    alone = prediction.step_seconds - before / g.iterations
    if g.ahead and rollout > alone * g.iterations:
        waits = replace(options, role_seconds=(rollout + sent) / g.iterations - alone)
        prediction = predict(plan, model, cluster, dtype, options=waits, prepared=prepared)
    said = RolloutPrediction(
        sampling.ranks, rollout, alone, generator is not None, sent, g.ahead, g.iterations,
        max(prices, key=lambda price: price.seconds).token,
    )  # fmt: skip
    if generator is None:
        memory = with_sampling(prediction.memory, plan, model, dtype, g.rows)
        over = over_limit(memory, prediction.limits, prediction.chips) + over_host(memory, cluster)
        return replace(prediction, role=said, memory=memory, over=over)
    busy = _busy(sampling, prices, g.iterations)
    return with_role_ranks(prediction, plan, generator, RoleCosts(rollout, busy, costs.costs), dtype, cluster, said)


def _busy(plan: Plan, prices: Sequence[RolloutPrice], iterations: int) -> dict[int, float]:
    """By rank of a generator, about how long it computes for each step: stages of a pipeline work in turn."""
    return {
        rank: price.seconds / len(pipeline.stages) / iterations
        for pipeline, price in zip(plan.pipelines, prices, strict=True) for rank in pipeline.ranks
    }  # fmt: skip


def weight_seconds(source: CompiledPlan, target: CompiledPlan, costs: CostModel) -> float:
    """Of the trained weights from the ranks of one plan to those of another one."""
    flows: dict[tuple[int, int], float] = {}
    for _, pieces in weight_moves(source, target):
        for piece in pieces:
            flows[piece.src, piece.dst] = flows.get((piece.src, piece.dst), 0.0) + piece.box.size * costs.item
    arrival = costs.links.exchange([(src, dst, size) for (src, dst), size in flows.items()])
    return arrival.seconds + arrival.latency
