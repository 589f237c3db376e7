"""Seconds of layers, embedding and head on one chip: measured ones (``calibrate``) where there are, else by formula.

``share`` is the rank's part of heads, columns and vocabulary: 1/tp for an equal split. ``rows``: sequences of the
micro-batch; ``length``: tokens per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hetero_megatron.predictor.cost.modelled_operators import ModelledOperators, Seconds
from hetero_megatron.predictor.cost.product_cost import nearest
from hetero_megatron.predictor.cost.rates import LayerRow
from hetero_megatron.spec import ModelSpec, shares
from hetero_megatron.spec.expert_load import ExpertLoad
from hetero_megatron.spec.flops import layers_by_kind, module_layer
from hetero_megatron.utils.cached_method import cached_method

IN_FP8 = ("layers", "split_layers")  # tables whose rows differ where linear modules are in fp8


@dataclass(frozen=True, eq=False)
class Operators(ModelledOperators):
    """Times of one chip for one model, measured ones first: rows of the chip's tables at exactly their sizes, elsewhere
    the modelled time, corrected by measured over modelled at the nearest sizes. Where layers are of several kinds,
    each is measured, and the average layer is their mean."""

    @cached_property
    def _kinds(self) -> tuple[tuple[Operators, float], ...]:
        """(of layers of one kind, their share of the layers), where there are several kinds, which were measured."""
        models = layers_by_kind(self.model)
        kinds = tuple((replace(self, model=model), share) for model, share in models)
        return kinds if len(kinds) > 1 and all(kind.layers_measured for kind, _ in kinds) else ()

    @property
    def layers_measured(self) -> bool:
        """In the dtype in question or, of layers in fp8, in that of the run."""
        in_fp8 = self.fp8 is not None and self.unquantised._measured("layers")
        return bool(self._kinds or self._measured("layers") or in_fp8)

    def layer(
        self, share: float, rows: float, length: int, exchange: Seconds = (0.0, 0.0), host_seconds: float = 0.0,
        load: ExpertLoad | None = None,
    ) -> Seconds:  # fmt: skip
        """One decoder layer for ``rows`` sequences of ``length`` tokens, an average one where layers differ.

        Args:
            exchange: (forward, backward) seconds of its collectives; host_seconds: seconds of them on the host, per
                direction.
            load: of its routed experts; None: of a plain TP group.
        """
        if load is not None:
            plain = self.layer(share, rows, length, exchange, host_seconds)
            extra = self.beyond_plain(share, rows, length, load)
            return plain[0] + extra[0], plain[1] + extra[1]
        if self._kinds:
            return _mean((x.layer(share, rows, length, exchange, host_seconds), part) for x, part in self._kinds)
        if self.layers_measured:
            forward, backward = self._measured_layer(share, rows, length)
            return forward + exchange[0], backward + exchange[1]
        return self.layer_by_operators(share, rows, length, exchange, host_seconds) if rows else (0.0, 0.0)

    def _measured_layer(self, share: float, rows: float, length: int) -> Seconds:
        """Layers that were only measured in the dtype of the run differ in fp8 as modelled ones do."""
        if self._measured("layers") or not rows:
            return self._from_table("layers", share, rows, length)
        unquantised = self.unquantised.layer(share, rows, length)
        modelled, plain = (x.layer_by_operators(share, rows, length) for x in (self, self.unquantised))
        return unquantised[0] * modelled[0] / plain[0], unquantised[1] * modelled[1] / plain[1]

    def elementwise(self, share: float, rows: float, length: int, load: ExpertLoad | None = None) -> float:
        """What a layer takes more with elementwise recompute: measured where it has no routed experts; else as much
        slower than modelled as all small operators of a measured layer, beside its products and attention."""
        if load is None and rows and self._has("elementwise"):
            return sum(self._from_table("elementwise", share, rows, length))
        modelled = super().elementwise(share, rows, length, load)
        if not rows or not self.layers_measured:
            return modelled
        tokens = rows * length
        others = self.attention(share, rows, length)[0] + self.linear_attention(share, rows, length)
        others += self.products(share, tokens).forward + self.adapters(share, tokens) + self.from_few_bits(share)
        small = self.layer(share, rows, length)[0] - others
        return modelled * max(1.0, small / self.small_operators(share, tokens))

    def core_again(self, share: float, rows: float, length: int) -> float:
        """What a layer takes more with selective recompute: the core of attention or of linear attention again; that of
        the latter is measured."""
        if self._kinds:
            return sum(part * x.core_again(share, rows, length) for x, part in self._kinds)
        if rows and self._has("selective"):
            return sum(self._from_table("selective", share, rows, length))
        return self.attention(share, rows, length)[0] + self.linear_attention(share, rows, length)

    @cached_property
    def unquantised(self) -> Operators:
        """The same chip where nothing is in fp8."""
        return replace(self, fp8=None)

    def beyond_plain(self, share: float, rows: float, length: int, load: ExpertLoad) -> Seconds:
        """What a layer takes more with this load than with that of a plain TP group, in an average layer."""
        plain = self.plain(share, rows * length)
        assert plain is not None, "a load of a dense model"
        dense = self.dense_mlp(share, rows * length, load.layers), self.dense_mlp(share, rows * length, plain.layers)
        loaded, plain_experts = self.experts(load), self.experts(plain)
        forward, backward = (
            dense[0][i] - dense[1][i] + load.layers * loaded[i] - plain.layers * plain_experts[i] for i in (0, 1)
        )
        return forward, backward

    @cached_method
    def split(self, share: float, rows: float, length: int) -> tuple[Seconds, Seconds]:
        """((forward, backward) of a layer without attention core and launches, factor that corrects :meth:`attention`),
        for a rank with ``length`` tokens of each sequence."""
        if not (rows and length):
            return (0.0, 0.0), (1.0, 1.0)
        if self._kinds:
            of_kinds = [(x.split(share, rows, length), part) for x, part in self._kinds]
            cores = [part * x.attention(share, rows, length)[0] for x, part in self._kinds]
            of_cores = [(ratio, core) for ((_, ratio), _), core in zip(of_kinds, cores, strict=True) if core]
            correction = _mean(of_cores) if of_cores else (1.0, 1.0)
            return _mean((rest, part) for (rest, _), part in of_kinds), correction
        plain = self._modelled()
        layer, core = plain.layer(share, rows, length), plain.attention(share, rows, length)
        correction, ratio = self._corrections(share, rows, length)
        return ((layer[0] - core[0]) * correction[0], (layer[1] - core[1]) * correction[1]), ratio

    def _modelled(self, layers: tuple[LayerRow, ...] = ()) -> Operators:
        """The same without measured layers but these. Host seconds of launches count once per layer, with attention
        and what it exchanges."""
        bare = replace(self.rates, layers=layers, layer_seconds=0.0, layer_backward_seconds=0.0)
        fp8 = replace(self.fp8, rates=replace(self.fp8.rates, layers=layers)) if self.fp8 is not None else None
        return replace(self, rates=bare, fp8=fp8)

    def _corrections(self, share: float, rows: float, length: int) -> tuple[Seconds, Seconds]:
        """Measured over modelled time of (a layer without its attention core, the core). If attention was measured
        separately, its factor is 1 and the rest takes the difference of measured whole layers."""
        measured, plain = self._measured("layers"), self._modelled()
        if not measured:
            return ((1.0, 1.0), (1.0, 1.0)) if self.fp8 is None else self.unquantised._corrections(share, rows, length)
        if self.rates.attention:
            row = min(
                measured, key=lambda r: (r.tp != round(1 / share), abs(r.micro_batch_size * r.seq_length - length))
            )
            size = (1 / row.tp, row.micro_batch_size, int(row.seq_length))
            layer, core = plain.layer(*size), plain.attention(*size)
            if row.forward > core[0] and row.backward > core[1]:
                correction = (
                    (row.forward - core[0]) / (layer[0] - core[0]),
                    (row.backward - core[1]) / (layer[1] - core[1]),
                )
                return correction, (1.0, 1.0)
        modelled, corrected = (x.layer(share, rows, length) for x in (plain, self._modelled(tuple(measured))))
        ratio = corrected[0] / modelled[0], corrected[1] / modelled[1]
        return ratio, ratio

    @property
    def split_measured(self) -> bool:
        """Whether B_INPUT and W of this model's layers were measured."""
        return self._has("split_layers")

    def split_layer(self, share: float, rows: float, length: int, load: ExpertLoad | None = None) -> Seconds:
        """(B_INPUT, W) of one layer: measured, else as :func:`_split` has it; ``load``: as for :meth:`layer`."""
        if load is not None and rows:
            plain, extra = self.split_layer(share, rows, length), self.beyond_plain(share, rows, length, load)[1]
            return plain[0] + extra / 2, plain[1] + extra / 2
        if self._kinds:
            return _mean((x.split_layer(share, rows, length), part) for x, part in self._kinds)
        return self._from_table("split_layers", share, rows, length)

    def _split_layer_by_operators(self, share: float, rows: float, length: int) -> Seconds:
        by_operators, tokens = self.layer_by_operators(share, rows, length)[1], rows * length
        lora = self.model.lora is not None
        weights = self.adapters(share, tokens) if lora else self.products(share, tokens).weight
        return _split(self.layer(share, rows, length)[1], weights / by_operators)

    def split_head(self, share: float, rows: float, length: int, chunked: bool | None = None) -> Seconds:
        """The same of the head, with modules that predict further tokens."""
        main, count = self._split_main_head(share, rows, length, chunked), self.model.mtp_layers
        if not count or not rows:
            return main
        project = self._projection(share, rows, length)[0]
        layer = self._of_modules.split_layer(share, rows, length)
        return main[0] * (1 + count) + count * (project + layer[0]), main[1] * (1 + count) + count * (
            project + layer[1]
        )

    def _split_main_head(self, share: float, rows: float, length: int, chunked: bool | None = None) -> Seconds:
        """Of the main loss's tokens alone."""
        if self.in_chunks(share, rows, length, chunked):
            return self._main_head(share, rows, length, True)[1], 0.0
        return self._from_table("split_head", share, rows, length)

    def _split_head_by_operators(self, share: float, rows: float, length: int) -> Seconds:
        columns = share * self.model.vocab_size * (self.model.lora is None)
        product = self.gemm(rows * length, columns, self.model.hidden_size)
        by_operators = self.head_by_operators(share, rows, length, False)[1]
        return _split(self._main_head(share, rows, length, False)[1], product / by_operators)

    def embed(self, share: float, rows: float, length: int) -> Seconds:
        return self._from_table("embed", share, rows, length)

    def head(self, share: float, rows: float, length: int, chunked: bool | None = None) -> Seconds:
        """Final norm, output matrix, softmax and loss; modules that predict further tokens go there, too, and what they
        take before it is counted here, without exchanges.

        Args:
            chunked: the stage goes through chunks of tokens (``parallel/vocab.py``), which make the gradients of
                head and loss in forward; None: as a stage does of which all ranks are like this one.
        """
        main, count = self._main_head(share, rows, length, chunked), self.model.mtp_layers
        if not count or not rows:
            return main
        project, layer = self._projection(share, rows, length), self._of_modules.layer(share, rows, length)
        forward, backward = ((1 + count) * main[i] + count * (project[i] + layer[i]) for i in (0, 1))
        return forward, backward

    @cached_property
    def _of_modules(self) -> Operators:
        """Of a model whose average layer is that of modules that predict further tokens; it is not measured, where the
        model's own layers are of several kinds."""
        return replace(self, model=module_layer(self.model))

    def modules_again(self, share: float, rows: float, length: int, recompute: str) -> float:
        """Seconds in which backward of all modules that predict further tokens computes again what ``recompute`` says,
        without exchanges."""
        if not self.model.mtp_layers or not rows:
            return 0.0
        if recompute == "full":
            seconds = self._projection(share, rows, length)[0] + self._of_modules.layer(share, rows, length)[0]
        else:
            seconds = {
                "selective": lambda: self._of_modules.core_again(share, rows, length),
                "elementwise": lambda: self._of_modules.elementwise(share, rows, length),
            }.get(recompute, lambda: 0.0)()
        return self.model.mtp_layers * seconds

    def _projection(self, share: float, rows: float, length: int) -> Seconds:
        """(forward, backward) of what a module does before its layer: each rank of a TP group has its own tokens."""
        tokens, h = rows * length * share, self.model.hidden_size
        product = self.gemm(tokens, h, 2 * h)
        moved = 8 * tokens * h * self.item / self.rates.bytes_per_second
        return product + moved, 2 * (product + moved)

    def _main_head(self, share: float, rows: float, length: int, chunked: bool | None = None) -> Seconds:
        """Of the main loss's tokens alone. What a loss does beside a cross-entropy is as much slower than modelled as
        that is, and has its gradients in forward."""
        plain = self._cross_entropy_head(share, rows, length, chunked)
        of_vocab, others = self.loss_words
        if not (of_vocab and rows):
            return plain
        moved = 4 * rows * length * (of_vocab * share * self.model.vocab_size + others)
        slower = sum(plain) / sum(self.head_by_operators(share, rows, length, chunked))
        return plain[0] + slower * moved / self.rates.bytes_per_second, plain[1]

    def _cross_entropy_head(self, share: float, rows: float, length: int, chunked: bool | None = None) -> Seconds:
        tabled = self._from_table("head", share, rows, length)
        if chunked is None or chunked == self.in_chunks(share, rows, length):
            return tabled
        # Other ranks of the stage decide, which are not measured alone.
        modelled, usual = (self.head_by_operators(share, rows, length, way) for way in (chunked, not chunked))
        faster = sum(tabled) / sum(usual) if rows else 1.0
        return modelled[0] * faster, modelled[1] * faster

    def exchange(self, share: float, rows: float, length: int, seconds: float) -> Seconds:
        """(forward, backward) seconds of one exchange of activations in the TP group, which alone takes ``seconds``:
        plus measured waiting of its ranks for each other."""
        if not seconds or not self._has("waiting"):
            return seconds, seconds
        forward, backward = self._from_table("waiting", share, rows, length)
        return seconds + forward, seconds + backward

    def _elementwise_by_operators(self, share: float, rows: float, length: int) -> Seconds:
        return (super().elementwise(share, rows, length),) * 2

    @cached_method
    def _from_table(self, table: str, share: float, rows: float, length: int) -> Seconds:
        """Measured rows at exactly their sizes; between and beyond sizes of the same TP degree and length on the line
        through the two nearest, beyond them no less than modelled; elsewhere the modelled time, corrected by measured /
        modelled at the nearest sizes."""
        if not rows:
            return 0.0, 0.0
        if self._kinds:
            return _mean((x._from_table(table, share, rows, length), part) for x, part in self._kinds)
        measured = self._measured(table)
        for row in measured:
            if (row.micro_batch_size, row.seq_length) == (rows, length) and math.isclose(1 / row.tp, share):
                return row.forward, row.backward
        model = {
            "layers": self.layer_by_operators, "waiting": self.layer_by_operators, "embed": self.embed_by_operators,
            "head": self.head_by_operators, "split_layers": self._split_layer_by_operators,
            "split_head": self._split_head_by_operators, "elementwise": self._elementwise_by_operators,
            "selective": lambda *size: (self.linear_attention(*size),) * 2,
        }[table]  # fmt: skip
        forward, backward = model(share, rows, length)
        if not measured:
            return forward, backward
        if table != "waiting" and (on_line := _on_line(measured, share, rows, length, (forward, backward))) is not None:
            return on_line
        ratios: list[list[tuple[tuple[float, ...], float]]] = [[], []]
        for row in measured:
            size = (1 / row.tp, row.micro_batch_size, int(row.seq_length))
            for ratio, seconds, modelled in zip(ratios, (row.forward, row.backward), model(*size)):
                ratio.append((size, seconds / modelled))
        sizes = (share, rows, length)
        return forward * nearest(ratios[0], sizes), backward * nearest(ratios[1], sizes)

    def _has(self, table: str) -> bool:
        """Whether a table has this model's layers, or those of each kind."""
        return all(x._measured(table) for x, _ in self._kinds) if self._kinds else bool(self._measured(table))

    @cached_method
    def _measured(self, table: str) -> list[LayerRow]:
        rates = self.rates if self.fp8 is None or table not in IN_FP8 else self.fp8.rates
        return [r for r in getattr(rates, table) if r.fingerprint == self.fingerprint]


def _on_line(
    measured: Sequence[LayerRow], share: float, rows: float, length: int, least: Seconds
) -> Seconds | None:
    """Seconds on the line through the two nearest sizes of the same TP degree and length, beyond the largest one at
    least ``least``; None: fewer than two were measured, or ``rows`` are fewer."""
    alike = (r for r in measured if r.seq_length == length and math.isclose(1 / r.tp, share))
    by_size = {r.micro_batch_size: r for r in alike}
    same = [by_size[size] for size in sorted(by_size)]
    if len(same) < 2 or rows < same[0].micro_batch_size:
        return None
    b = next((i for i, r in enumerate(same) if r.micro_batch_size > rows), len(same) - 1)
    low, high = same[b - 1], same[b]
    t = (rows - low.micro_batch_size) / (high.micro_batch_size - low.micro_batch_size)
    ends = (low.forward, high.forward), (low.backward, high.backward)
    if t > 1:  # beyond the largest size nothing becomes faster
        forward, backward = (max(x + t * max(y - x, 0.0), floor) for (x, y), floor in zip(ends, least, strict=True))
    else:
        forward, backward = (x + t * (y - x) for x, y in ends)
    return forward, backward


def _mean(seconds: Iterable[tuple[Seconds, float]]) -> Seconds:
    """Of kinds of layers, each with its share of them."""
    forward, backward, whole = (sum(column) for column in zip(*((s[0] * n, s[1] * n, n) for s, n in seconds)))
    return forward / whole, backward / whole


def _split(backward: float, weight_share: float) -> Seconds:
    """(B_INPUT, W) where they were not measured: weight gradients are the products of a forward once more, as far as
    measured backwards are as fast as modelled ones, and splitting costs nothing."""
    weight = backward * weight_share
    return backward - weight, weight


def heads_and_columns(spec: ModelSpec, tp_split: tuple[int, ...], t: int) -> tuple[float, float]:
    """(share of heads, share of columns) that TP rank ``t`` computes; exactly 1/tp where the axes divide evenly."""
    share = shares(spec, tp_split)[t]
    heads = (share.q_heads[1] - share.q_heads[0]) / spec.num_heads
    return heads, (share.ffn[1] - share.ffn[0]) / spec.ffn_hidden_size
