"""Bytes per token that a layer of linear attention keeps from forward to backward, and needs in backward, as plain
formulas: what ``model/gated_delta_net.py`` and ``ops/gated_delta_chunks.py`` have, and, of Mamba-2,
``spec/state_space.py``."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_megatron.spec.model_spec import ModelSpec
from hetero_megatron.spec.state_space import (
    StateSpace,
    beside_rule_bytes,
    carried_token_bytes,
    core_bytes,
    outside_bytes,
    rule_backward_bytes,
)

CHUNK = 64  # tokens, of the gated delta rule


def copied_width(spec: ModelSpec, tp: float) -> float:
    """Key features of a token that ranks of a TP group have as copies, over all of them: of Mamba-2 with fewer groups
    than ranks."""
    delta = spec.delta
    if not isinstance(delta, StateSpace) or tp <= delta.key_heads:
        return 0.0
    return (min(tp, delta.value_heads) - delta.key_heads) * delta.key_dim


def delta_activation_bytes(spec: ModelSpec, recompute: str, itemsize: int, tp: float = 1.0) -> float:
    """Of all heads:

    - what is projected; the gated norm's input and output, and what the projection after it reads, 3 v;
    - the convolutions' outputs, 2 k + v, and, per value head, how much is written;
    - in at least fp32, per value head (of Kimi Delta Attention, per key feature): what decay is the softplus of, that,
      and the decay; and a norm's number.

    ``selective`` recomputes the second and third but for the norm's number, ``elementwise`` what the last projection
    reads. Kimi Delta Attention keeps the sigmoid of the gate in its place, and not what decays are made of.
    """
    delta, wide = spec.delta, max(itemsize, 4)
    assert delta is not None
    v, heads = delta.value_width, delta.value_heads
    core = _core_bytes(spec, itemsize)
    if isinstance(delta, StateSpace):
        copies = 2 * copied_width(spec, tp) * itemsize * (1 if recompute == "selective" else 2)
        return outside_bytes(delta, recompute, itemsize) + copies + (0 if recompute == "selective" else core)
    kimi = delta.by_feature
    projected = delta.projected - (delta.decays if kimi else 0)
    outside = itemsize * (projected + (2 if recompute == "elementwise" and not kimi else 3) * v) + wide * heads
    return outside + (0 if recompute == "selective" else core)


def _core_bytes(spec: ModelSpec, itemsize: int) -> float:
    assert spec.delta is not None
    if isinstance(spec.delta, StateSpace):
        return core_bytes(spec.delta, itemsize)
    heads = spec.delta.value_heads
    decays = 3 * spec.delta.decays
    return itemsize * (2 * spec.delta.key_width + spec.delta.value_width + heads) + max(itemsize, 4) * decays


@dataclass(frozen=True)
class CarriedBytes:
    """Of all heads, what a layer has on top where context groups divide the tokens (``parallel/context_states.py``).

    Attributes:
        token: kept of each token: what convolutions look at, which was exchanged.
        carried: kept of each token that has a state before its run: its values with further features, and what the rule
            makes of these; run: of each such run: the state before it, and what the rule made of the first one.
        working: of each of those tokens, in backward of the rule with further features; again: of each token, what is
            made again there.
    """

    token: float
    carried: float
    run: float
    working: float
    again: float


def carried_bytes(spec: ModelSpec, recompute: str, itemsize: int) -> CarriedBytes:
    """``recompute``: none | selective | elementwise."""
    delta, wide = spec.delta, max(itemsize, 4)
    assert delta is not None
    heads, dk, dv = delta.value_heads, delta.key_dim, delta.value_dim
    token = itemsize * (2 * delta.key_width + heads * dv)
    carried: float = itemsize * heads * (2 * dk + dv)
    run: float = wide * heads * dk * (2 * dv + dk)
    working: float = wide * heads * (2 * dk * dk / CHUNK + 7 * dk)
    if isinstance(delta, StateSpace):
        carried, run, working = carried_token_bytes(delta, itemsize)
    if recompute != "selective":
        return CarriedBytes(token, carried, run, working, 0.0)
    return CarriedBytes(0.0, 0.0, 0.0, working + carried, token + _core_bytes(spec, itemsize))


def delta_backward_bytes(spec: ModelSpec, itemsize: int, tp: float = 1.0) -> float:
    """Of backward of the gated delta rule, which runs its forward again, in at least fp32, at the worst of its moments
    (``_gradients`` of ``ops/gated_delta_chunks.py``). In elements per value head, r key heads of each:

    - all the time what chunks have before their states are known: normalised queries and keys and products of keys,
      r (2 dk + CHUNK + 2); values, what is written and read, 2 dv + dk; three products of pairs, 3 CHUNK; and 3;
    - first the states and their gradients, 2 dk dv / CHUNK, gradients of the output and of what is written, and that,
      3 dv, and a gradient of keys; then, with the states alone, further gradients and the right sides that are solved
      for; solved ones and products of pairs; and gradients of queries and keys.
    """
    delta = spec.delta
    assert delta is not None
    if isinstance(delta, StateSpace):
        return rule_backward_bytes(delta, itemsize, copied_width(spec, tp))
    dk, dv, r = delta.key_dim, delta.value_dim, 1 / delta.values_per_key
    states = dk * dv / CHUNK
    if delta.by_feature:
        return max(itemsize, 4) * delta.value_heads * _by_features(dk, dv, r)
    chunks = r * (2 * dk + CHUNK + 2) + 2 * dv + dk + 3 * CHUNK + 3
    moments = (
        2 * states + 3 * dv + dk, states + 3 * dv + 2 * dk + CHUNK, states + 2 * dv + 4 * dk + CHUNK,
        4 * dk + 2 * dv + CHUNK, 3 * dk + dv + 3 * CHUNK, 2 * dk + dv + r * (3 * dk + 3 * CHUNK) + 4,
    )  # fmt: skip
    return max(itemsize, 4) * delta.value_heads * (chunks + max(moments))


def _by_features(dk: int, dv: int, r: float) -> float:
    """The same where keys decay feature by feature (``ops/gated_delta_channels.py``): decays in three forms, products
    of pairs with their decays, and, where these are gone back through, gradients of both sides, halves of tokens with
    their decays, and sums of what came before."""
    states, halves = dk * dv / CHUNK, max(3.5 * dk, 2.5 * dk + CHUNK / 4)
    chunks = r * (2 * dk + 2) + 2 * dv + 4 * dk + 3 * CHUNK + 1
    moments = (
        2 * states + 3 * dv + dk, states + 3 * dv + 2 * dk + CHUNK, states + 2 * dv + 4 * dk + CHUNK,
        dv + (5 + r) * dk + 2 * CHUNK + halves, dv + 8 * dk + CHUNK + halves,
    )  # fmt: skip
    return chunks + max(moments)


def delta_core_bytes(
    spec: ModelSpec, recompute: str, itemsize: int, rows: int, tokens: float, tp: float = 1.0
) -> float:
    """That of ``tokens`` of ``rows`` sequences, all heads, with the state before each and its gradient (of Mamba-2, two
    of it); ``selective`` makes its output again and holds its gradient besides."""
    delta = spec.delta
    assert delta is not None
    state = max(itemsize, 4) * delta.value_heads * delta.key_dim * delta.value_dim
    ends = (3 if isinstance(delta, StateSpace) else 2) * rows * state
    again = 2 * tokens * itemsize * delta.value_width if recompute == "selective" else 0.0
    if isinstance(delta, StateSpace):
        again += tokens * beside_rule_bytes(delta, recompute, itemsize)
    return tokens * delta_backward_bytes(spec, itemsize, tp) + ends + again


def delta_operands(spec: ModelSpec, tp: float = 1.0) -> float:
    """Elements of operands of weight gradients: those of all that is projected, and what the last projection reads."""
    assert spec.delta is not None
    return spec.delta.projected + spec.delta.value_width + 2 * copied_width(spec, tp)
