"""Bytes that backward through a layer or the head needs beside what they keep, moment by moment, as plain formulas of a
model's configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hetero_megatron.spec.activation_bytes import mlp_widths, shared_inputs
from hetero_megatron.spec.expert_load import (
    ExpertLoad,
    expert_activation_bytes,
    expert_backward_bytes,
    expert_operand_bytes,
    plain_load,
)
from hetero_megatron.spec.flops import common_columns, layers_by_kind, linear_layers, mixer_layers
from hetero_megatron.spec.lora import NF4_CHUNK, NF4_MAKING
from hetero_megatron.spec.model_spec import ModelSpec

Linear = Callable[[float, float], float]  # (outputs, inputs) -> bytes of backward in fp8 beside the operands


class Cores(NamedTuple):
    """Bytes that backward of the attention core works with (None: of a rank with all tokens), and that of linear
    attention."""

    attention: float | None
    linear: float = 0.0

    def times(self, rows: int) -> Cores:
        """Of so many sequences."""
        return Cores(None if self.attention is None else rows * self.attention, rows * self.linear)


class BackwardMoment(NamedTuple):
    """Bytes while backward is in one operator of a layer.

    Attributes:
        allocated: gradients and helpers; freed: of what the layer kept, what is gone by then; weight: the gradient of a
            weight before it is added up; waiting: of gradients made before, what waits for W where backward is split.
    """

    allocated: float
    freed: float = 0.0
    weight: float = 0.0
    waiting: float = 0.0


def layer_backward_bytes(
    spec: ModelSpec, tokens: int, itemsize: int = 2, tp: float = 1.0, shards: int | None = None,
    load: ExpertLoad | None = None, linear: Linear | None = None, cores: Cores | None = None, split: bool = False,
) -> int:  # fmt: skip
    """Bytes that backward through one layer needs beside what the layer keeps, at the worst of its moments.

    The gradient that goes around the block is there all the time (h on the token shard). Of a split backward nothing
    that a product reads is gone, the gradient that goes into the MLP is another one, and weights get none.

    Args:
        linear: where linear modules are in fp8, the backward of one; None: in the dtype of the weights.
        cores: of a rank of a context group; None: of a rank with all tokens, of long sequences.
        split: weight gradients wait for their W.
    """
    if spec.single_blocks and len(kinds := layers_by_kind(spec)) > 1:
        of_kinds = (layer_backward_bytes(kind, tokens, itemsize, tp, shards, load, linear, cores, split)
                    for kind, _ in kinds)  # fmt: skip
        return max(of_kinds)
    if spec.moe is not None:
        load = load or plain_load(spec, tokens, 1 / tp, shards or max(1, round(tp)))
    routed = load.layers if load is not None else 0.0
    row, shard = tokens * itemsize, tokens * itemsize * spec.hidden_size / (shards or tp)
    sizes = _Sizes(spec, row, itemsize, tp, (common_columns(spec, 0.0 if routed < 1 else 1.0)) / tp, linear)
    summed = scatter_bytes(row * spec.hidden_size, shards or max(1, round(tp)), itemsize)
    mlp_kept = mlp_kept_bytes(spec, tokens, itemsize, tp, routed)
    norm = norm_backward_bytes(shard, itemsize) if spec.norm_placement != "pre" else 0  # in a norm after the MLP
    moments = [BackwardMoment(norm), *_mlp(sizes), BackwardMoment(summed, mlp_kept)]
    if mixer_layers(spec):
        moments += _attention(sizes, mlp_kept, shard, None if cores is None else cores.attention)
    if load is not None and routed:
        row_bytes, expert_peak = expert_backward_bytes(spec, load, itemsize)
        operands = routed * expert_operand_bytes(spec, load, itemsize)
        moments += [BackwardMoment(row_bytes), BackwardMoment(expert_peak, waiting=operands)]
    if linear_layers(spec):
        from hetero_megatron.spec.delta_bytes import delta_backward_bytes

        experts = routed * expert_activation_bytes(spec, load, itemsize) if load is not None else 0.0
        freed = 0.0 if spec.single_blocks else mlp_kept + row * spec.hidden_size + experts
        core_bytes = tokens * delta_backward_bytes(spec, itemsize, tp) / tp if cores is None else cores.linear
        moments.append(BackwardMoment(core_bytes, freed, 0.0, row * spec.hidden_size))
    if split:
        return round(2 * shard + max(x.allocated + x.waiting for x in moments))
    return round(shard + max(x.allocated - x.freed + x.weight for x in moments))


def adapters_again_bytes(spec: ModelSpec, tokens: int, itemsize: int, tp: float, shards: int, head: bool) -> int:
    """Bytes beside what a layer keeps when forward has made all of it again, in ``down_proj`` of a dense MLP with an
    adapter: what base and adapter put out; the gradient that goes around the block, and (no ``head``) as it came from
    another stage; over a TP group, that gathered, and what both norms put out, before it was."""
    if spec.lora is None or spec.moe is not None or "down_proj" not in spec.lora.targets:
        return 0
    whole, split = tokens * itemsize * spec.hidden_size, tp > 1
    return round((2 + split) * whole + (1 + split * (3 - head)) * whole / shards)


def norm_backward_bytes(norm_bytes: float, itemsize: int) -> int:
    """Gradients and helpers of a norm of ``norm_bytes``: the gradient of its output, and three that are as large, of 16
    bits four, which are wide."""
    return round(norm_bytes * (9 if itemsize == 2 else 4))


def scatter_bytes(whole: float, shards: int, itemsize: int, rows: int = 1) -> float:
    """Beside partial sums over a TP group, of ``whole`` bytes on each of its ``shards`` ranks, what they are added up
    with: parts that come, of several sequences those that go, and the sum, of 16 bits in fp32 with a part of it."""
    if shards <= 1:
        return 0.0
    shard_bytes = whole / shards
    return whole + (whole - shard_bytes) * (2 if rows > 1 else 1) + shard_bytes * (4 if itemsize == 2 else 1)


def mlp_kept_bytes(spec: ModelSpec, tokens: float, itemsize: int, tp: float, routed: float) -> float:
    """Bytes that a layer's MLP keeps and that are free when attention's backward begins; of experts, which keep more,
    what all tokens share. ``routed``: share of the layers that are mixtures of experts."""
    moe_share = 0.0 if routed < 1 else 1.0
    columns = mlp_widths(spec) * common_columns(spec, moe_share) / tp
    return tokens * itemsize * (columns + shared_inputs(spec, moe_share, tp) * spec.hidden_size)


class _Sizes(NamedTuple):
    """``row``: bytes of one number per token; ``f``: columns of the MLP here."""

    spec: ModelSpec
    row: float
    item: int
    tp: float
    f: float
    linear: Linear | None

    def weight(self, outputs: float, inputs: float) -> float:
        """Bytes beside a product's operands while its weight's gradient is made, or a weight of few bits is: fp32 is
        added where it belongs, and of 16 bits there is a gradient first."""
        spec, size = self.spec, outputs * inputs
        if self.linear is not None:
            return self.linear(outputs, inputs)
        if spec.lora is not None:
            making = NF4_MAKING * min(NF4_CHUNK, size) if spec.in_nf4 else 0
            return size * self.item + making if spec.in_few_bits else 0.0
        return size * self.item if self.item == 2 else 0.0

    @property
    def whole(self) -> float:
        """A gradient after the gather."""
        return self.row * self.spec.hidden_size if self.tp > 1 else 0.0


def _mlp(x: _Sizes) -> Iterator[BackwardMoment]:
    """In ``down_proj``, in the activation, and in what is before it."""
    h, f = x.spec.hidden_size, x.f
    if not f:
        return
    yield BackwardMoment(x.whole + x.row * f, 0.0, x.weight(h, f))
    # The product is gone; its gradient, those of gate and up, and one helper.
    yield BackwardMoment(x.whole + x.row * (4 if x.spec.gated else 2) * f, x.whole + x.row * f)
    inputs = (2 if x.spec.gated else 1) * f
    joint = inputs if x.spec.lora is None else f  # a frozen matrix is made, and multiplied, by itself
    yield BackwardMoment(x.row * (inputs + h), x.row * mlp_widths(x.spec) * f, x.weight(joint, h))


def _attention(x: _Sizes, gone: float, shard: float, core: float | None) -> Iterator[BackwardMoment]:
    """In the norm before the MLP, in ``o_proj``, and in the attention core; ``gone``: bytes that the MLP kept."""
    spec, waiting = x.spec, x.row * x.spec.hidden_size
    yield BackwardMoment(norm_backward_bytes(shard, x.item), gone)
    gone += 0.0 if spec.single_blocks else shard  # the input of the norm before the MLP
    q, kv = (n * spec.head_dim / x.tp for n in (spec.num_heads, spec.num_kv_heads))
    values = q if spec.mla is None else spec.num_heads * spec.mla.v_dim / x.tp
    yield BackwardMoment(x.whole + x.row * values, gone, x.weight(spec.hidden_size, values), waiting)
    copies = 4 * q if x.item == 2 and kv < q else 0.0  # keys, values and their gradients for each query head
    yield BackwardMoment(x.row * (2 * q + 2 * kv + copies) if core is None else core, gone, 0.0, waiting)


def head_backward_bytes(
    spec: ModelSpec, tokens: int, itemsize: int = 2, tp: float = 1.0, chunked: bool = False
) -> tuple[int, int]:
    """Bytes that head and loss need beside what they keep, at the worst moment (before its weight has a gradient, when
    it has one): 16-bit logits beside their wide probabilities; the gradients of the head's input and, before it is
    added up, of its weight. To the latter's sum chunks of tokens add theirs, and what they keep is there with it."""
    h, vocab, wide = spec.hidden_size, spec.vocab_size / tp, max(itemsize, 4)
    weight = vocab * h * itemsize if spec.lora is None and not chunked and itemsize < wide else 0
    gradients = tokens * itemsize * h + weight
    logits = tokens * itemsize * vocab if itemsize < wide and not chunked else 0
    if logits:  # the wide probabilities are gone before the products of backward
        gradients -= tokens * (wide - itemsize) * vocab
    return round(logits), round(gradients)
