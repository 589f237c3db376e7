"""Seconds of operators, layers, embedding and head on one chip by formula, from its rates; without communication.

``share`` is the rank's part of heads, columns and vocabulary: 1/tp for an equal split. ``rows``: sequences of the
micro-batch; ``length``: tokens per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hetero_megatron.predictor.cost.expert_cost import expert_seconds
from hetero_megatron.predictor.cost.product_cost import Fp8Products, Products, in_all, nearest, product_seconds
from hetero_megatron.predictor.cost.rates import ChipRates, model_fingerprint
from hetero_megatron.spec import ModelSpec, logical_tensors
from hetero_megatron.spec.activation_bytes import norm_outputs
from hetero_megatron.spec.expert_load import ExpertLoad, plain_load
from hetero_megatron.spec.flops import (
    LOGITS_BYTES,
    PLAIN_WORDS,
    Words,
    adapter_products,
    attention_layers,
    common_columns,
    delta_flops,
    layer_attention_flops,
    layers_by_kind,
    linear_layers,
    mean_attention_pairs,
    mixer_layers,
    mlp_layers,
    visible_pairs,
)
from hetero_megatron.utils.cached_method import cached_method

Seconds = tuple[float, float]  # forward, backward
ATTENTION_BACKWARD = 2.5  # a flash backward runs five products for the forward's two
LINEAR_BACKWARD = 3.0  # the gated delta rule's, with its forward again
UNFUSED = 0.2  # cast, scale, mask, softmax, cast for one kernel: four more launches to a layer's about twenty
NF4_MOVED = 27  # bytes per element that is made of 4 bits: these, indices and numbers in fp32, written and read
UPDATE_BYTES = 28  # Adam reads gradient, master and two moments in fp32 and writes the last three


@dataclass(frozen=True, eq=False)
class ModelledOperators:
    """Times of one chip for one model, of which only single operators may be measured; results are cached.

    Args:
        rates: of the chip, in the dtype of the run.
        item: bytes per activation element.
        sequence_parallel: norms and residuals work on a token shard; False: on all tokens, on every TP rank.
        softmax_batches: as in :class:`~hetero_megatron.predictor.cost.layer_cost.CostOptions`.
        fp8: what the linear modules of layers compute in; None: the dtype of the run. Head, router, experts, adapters
            and attention stay in that dtype.
        logits_bytes: of logits on a rank, above which head and loss go through chunks of tokens.
        loss_words: as in :class:`~hetero_megatron.predictor.cost.cost_options.CostOptions`.
    """

    model: ModelSpec
    rates: ChipRates
    item: int
    sequence_parallel: bool = True
    softmax_batches: int = 0
    fp8: Fp8Products | None = None
    logits_bytes: int = LOGITS_BYTES
    loss_words: Words = PLAIN_WORDS

    @cached_property
    def fingerprint(self) -> str:
        return model_fingerprint(self.model)

    def in_chunks(self, share: float, rows: float, length: int, chunked: bool | None = None) -> bool:
        """``chunked``, or where that is None, whether the logits of so many tokens are too many for one piece."""
        if chunked is not None:
            return chunked
        logits = rows * length * max(self.item, 4) * math.ceil(share * self.model.vocab_size)
        return (1 + self.model.mtp_layers) * logits > self.logits_bytes

    @cached_method
    def experts(self, load: ExpertLoad) -> Seconds:
        """(forward, backward) of the routed experts of one mixture-of-experts layer, without links; rows of the whole
        model count, too, where kinds of layers were not measured apart."""
        fingerprint = self.fingerprint
        if all(row[0] != fingerprint for row in self.rates.experts):
            fingerprint = model_fingerprint(layers_by_kind(self.model)[0][0])
        return expert_seconds(self.model, self.rates, self.item, fingerprint, load, self.gemm)

    def attention(self, share: float, rows: float, length: int) -> Seconds:
        """The attention core: softmax(q k^T) v of this rank's heads."""
        flops = layer_attention_flops(self.model, mean_attention_pairs(self.model, length)) * share * rows
        measured = self.rates.attention
        if not measured:
            forward = flops / self.rates.attention_flops
            scored = rows * self.model.num_heads * length**2 * attention_layers(self.model)
            scores = self.rates.score_seconds * share * scored
            return forward + scores, ATTENTION_BACKWARD * forward + 2 * scores
        row = min(measured, key=lambda r: (abs(math.log(r[0] / length)), abs(math.log(r[2] / self.model.head_dim))))
        work = 4 * row[1] * row[2] * visible_pairs(round(row[0]))
        return flops / work * row[3], flops / work * row[4]

    def linear_attention(self, share: float, rows: float, length: int) -> float:
        """Forward of the gated delta rule of this rank's heads, with its convolutions, in an average layer: at the rate
        of attention, and what goes through memory: projections, and what convolutions and norm make of them."""
        delta, tokens = self.model.delta, rows * length * share
        if delta is None:
            return 0.0
        widths = 2 * delta.projected + 2 * (2 * delta.key_width + delta.value_width) + 4 * delta.value_width
        moved = widths * linear_layers(self.model) * self.item
        return tokens * (delta_flops(self.model) / self.rates.attention_flops + moved / self.rates.bytes_per_second)

    def carried(self, share: float, rows: float, tokens: int) -> float:
        """Forward of what the rule computes besides of tokens with a state before their run, in an average layer: with
        further features of values, as many as keys have, which it reads and writes."""
        delta = self.model.delta
        if delta is None or not tokens:
            return 0.0
        flops = delta_flops(self.model) * delta.further_width / delta.value_dim
        widths = linear_layers(self.model) * delta.value_heads * (4 * delta.key_dim + 3 * delta.value_dim)
        seconds = flops / self.rates.attention_flops + widths * self.item / self.rates.bytes_per_second
        return rows * tokens * share * seconds

    def elementwise(self, share: float, rows: float, length: int, load: ExpertLoad | None = None) -> float:
        """Norms before products and activations of an average layer, in forward: what reads and writes 4 h on the token
        shard, and gate, up and their product. ``load``: of its routed experts; None: of a plain TP group."""
        model, tokens = self.model, rows * length
        load = load or self.plain(share, tokens)
        routed = load.layers if load is not None else 0.0
        moved = tokens * 2 * norm_outputs(model) * model.hidden_size * (share if self.sequence_parallel else 1.0)
        moved += tokens * share * len(model.mlp_projections) * common_columns(model, routed)
        if load is not None:
            moved += routed * load.rows * len(model.mlp_projections) * load.columns
        return moved * self.item / self.rates.bytes_per_second

    def gemm(self, m: float, n: float, k: float, speed: float = 1.0) -> float:
        """[m, k] x [k, n]: FLOPs at ``speed`` x the rate for products of this size, or the memory traffic if that takes
        longer."""
        if min(m, n, k) <= 0:
            return 0.0
        rates = self.rates
        if rates.gemm:
            nearest_rate = nearest([(r[:3], 2 * r[0] * r[1] * r[2] / r[3]) for r in rates.gemm], (m, n, k))
            return 2 * m * n * k / (nearest_rate * speed)
        return product_seconds(rates, m, n, k, self.item * (m * n + n * k + m * k), speed)

    def gradient(self, m: float, n: float, k: float) -> float:
        """Of such a product, with respect to one operand."""
        return self.gemm(m, n, k, self.rates.gradient_speed)

    def linear(self, m: float, widths: Sequence[float], k: float) -> Products:
        """Linear modules of these output widths that get the same x [m, k]: one product, except in fp8, where each has
        scales of its own."""
        if self.fp8 is not None:
            return in_all(self.fp8.seconds(m, n, k) for n in widths)
        return Products(self.gemm(m, sum(widths), k), *2 * (self.gradient(m, sum(widths), k),))

    def optimizer(self, elements: float) -> float:
        """One Adam update of the owned elements."""
        rows = self.rates.optimizer
        if len(rows) > 1 and rows[-1][1] > rows[0][1]:  # a fixed part, and so much per element
            (a, s), (b, t) = rows[0], rows[-1]
            return float(max(s + (t - s) * (elements - a) / (b - a), 0.0))
        if rows:
            return elements / nearest([(r[:1], r[0] / r[1]) for r in rows], (max(elements, 1.0),))
        return elements * UPDATE_BYTES / self.rates.bytes_per_second

    def most_updated(self, seconds: float) -> float:
        """Upper bound on elements that are updated within ``seconds``."""
        rows = self.rates.optimizer
        if len(rows) > 1 and rows[-1][1] > rows[0][1]:
            (a, s), (b, t) = rows[0], rows[-1]
            return max(0.0, a + (seconds - s) * (b - a) / (t - s))
        if rows:
            return seconds * max(r[0] / r[1] for r in rows)
        return seconds * self.rates.bytes_per_second / UPDATE_BYTES

    def products(self, share: float, tokens: float) -> Products:
        """Seconds of the matrix products of a layer."""
        model = self.model
        h, routed = model.hidden_size, model.moe_share
        terms = [self._projections(share, tokens), self._mlp_products(share, tokens, common_columns(model, routed))]
        load = self.plain(share, tokens)
        if load is not None and model.moe is not None:
            router = self.gemm(load.tokens, model.moe.num_experts, h)
            terms.append(Products(*3 * (routed * (router + self.experts(load)[0]),)))
        return in_all(terms)

    def _projections(self, share: float, tokens: float) -> Products:
        """Those before and after attention, or linear attention, of an average layer."""
        delta, h = self.model.delta, self.model.hidden_size
        attention = self._of_attention(share, tokens).times(attention_layers(self.model))
        if delta is None:
            return attention
        linear_products = in_all([self.linear(tokens, *product) for product in delta.products(h, share)])
        return in_all([attention, linear_products.times(linear_layers(self.model))])

    def _of_attention(self, share: float, tokens: float) -> Products:
        """Latents are computed by every rank of a TP group."""
        model, mla = self.model, self.model.mla
        h, heads = model.hidden_size, share * model.num_heads
        if mla is None:
            q, kv = heads * model.head_dim, share * model.num_kv_heads * model.head_dim
            of_x = (q, kv, kv, q) if model.attn_gate else (q, kv, kv)
            return in_all([self.linear(tokens, of_x, h), self.linear(tokens, (h,), q)])
        return in_all([
            self.linear(tokens, (mla.q_rank or 0, mla.latents - (mla.q_rank or 0)), h),
            self.linear(tokens, (heads * mla.qk_dim,), mla.q_rank or h),
            self.linear(tokens, (heads * (mla.nope_dim + mla.v_dim),), mla.kv_rank),
            self.linear(tokens, (h,), heads * mla.v_dim),
        ])  # fmt: skip

    def plain(self, share: float, tokens: float) -> ExpertLoad | None:
        """The load of routed experts that a layer without another one has; None for a dense model."""
        if self.model.moe is None:
            return None
        return plain_load(self.model, tokens, share, max(1, round(1 / share)) if share else 1)

    def _mlp_products(self, share: float, tokens: float, columns: float) -> Products:
        h, width = self.model.hidden_size, share * columns
        up_products = self.linear(tokens, (width,) * (2 if self.model.gated else 1), h)
        return in_all([up_products, self.linear(tokens, (h,), width)])

    def dense_mlp(self, share: float, tokens: float, routed: float) -> Seconds:
        """(forward, backward) of what all tokens pass in an average layer's MLP."""
        columns = common_columns(self.model, routed)
        activation = ((2 if self.model.gated else 1) + 1) * columns * share * tokens * self.item
        products, small = self._mlp_products(share, tokens, columns), activation / self.rates.bytes_per_second
        return products.forward + small, products.input + products.weight + 2 * small

    def small_operators(self, share: float, tokens: float) -> float:
        """Forward of what a layer does beside products and attention. Read and written: norms and residuals (10 h, on
        the token shard), rotation (2 q + 2 kv), activation (2-3 f)."""
        model = self.model
        h, q, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        common = common_columns(model, model.moe_share)
        columns = (2 if model.gated else 1) * common
        local = 2 * (q + kv) * bool(model.ropes) * attention_layers(model) + columns + common
        norms = 5 * (mixer_layers(model) + mlp_layers(model)) * h * (share if self.sequence_parallel else 1.0)
        return tokens * self.item * (norms + share * local) / self.rates.bytes_per_second

    @cached_method
    def layer_by_operators(
        self, share: float, rows: float, length: int, exchange: Seconds = (0.0, 0.0), host_seconds: float = 0.0
    ) -> Seconds:
        model, tokens = self.model, rows * length
        products, small = self.products(share, tokens), self.small_operators(share, tokens)
        core, linear = self.attention(share, rows, length), self.linear_attention(share, rows, length)
        core = (core[0] + linear, core[1] + LINEAR_BACKWARD * linear)
        # Kernels are launched ahead of the device, so launching only counts where it takes longer than running them.
        unfused = self.softmax_batches and round(rows * share * model.num_heads) % self.softmax_batches
        launches = 1 + UNFUSED if unfused else 1.0
        launching = launches * self.rates.layer_seconds + host_seconds
        forward = max(products.forward + small + core[0] + exchange[0], launching)
        frozen, adapters = model.lora is not None, self.adapters(share, tokens)
        forward += adapters
        few_bits_seconds = self.from_few_bits(share)
        forward += few_bits_seconds
        gradient_products = products.input + (0.0 if frozen else products.weight)
        backward = gradient_products + few_bits_seconds + 2 * (small + adapters) + core[1] + exchange[1]
        return forward, max(backward, launches * self.rates.layer_backward_seconds + host_seconds)

    @cached_method
    def from_few_bits(self, share: float) -> float:
        """Seconds in which a layer's frozen weights in few bits, but those of experts, become what products multiply
        with: once in forward, and once in backward."""
        moved = 0.0
        for tensor in logical_tensors(self.model):
            if tensor.int8 and not tensor.per_expert:
                moved += tensor.size * (1 + self.item)
            elif tensor.nf4:
                moved += tensor.size * (NF4_MOVED + self.item)
        return share * moved / self.model.num_layers / self.rates.bytes_per_second

    def adapters(self, share: float, tokens: float) -> float:
        """Seconds of the adapters of a layer in forward: two narrow products each, and their addition."""
        lora = self.model.lora
        if lora is None:
            return 0.0
        seconds = 0.0
        for outputs, inputs, rank, layers in adapter_products(self.model):
            cut_rows = inputs == self.model.hidden_size  # else the columns
            n, k = (share * outputs, inputs) if cut_rows else (outputs, share * inputs)
            moved = 3 * n + (2 * k if lora.dropout else 0) + (2 * n if lora.dora else 0)
            moving = self.item * tokens * moved / self.rates.bytes_per_second
            seconds += layers * (self.gemm(tokens, rank, k) + self.gemm(tokens, n, rank) + moving)
        return seconds

    def embed_by_operators(self, share: float, rows: float, length: int) -> Seconds:
        moved = 2 * self.item * rows * length * self.model.hidden_size / self.rates.bytes_per_second
        return moved, 0.0 if self.model.lora is not None else 2 * moved

    def head_by_operators(self, share: float, rows: float, length: int, chunked: bool | None = None) -> Seconds:
        tokens, vocab = rows * length, share * self.model.vocab_size
        product = self.gemm(tokens, vocab, self.model.hidden_size)
        wide = max(self.item, 4)
        forward = tokens * vocab * (self.item + 3 * wide) / self.rates.bytes_per_second
        backward = tokens * vocab * (2 * wide + self.item) / self.rates.bytes_per_second
        backward += (2 if self.model.lora is None else 1) * self.gradient(tokens, vocab, self.model.hidden_size)
        if not self.in_chunks(share, rows, length, chunked):
            return product + forward, backward
        handed_on = 4 * tokens * self.model.hidden_size * self.item / self.rates.bytes_per_second  # and the norm's
        return product + forward + backward, handed_on
