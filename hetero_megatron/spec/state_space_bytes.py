"""Bytes per token of a layer of Mamba-2 beside those that any linear attention has (``spec/delta_bytes.py``): what
``model/state_space.py`` and ``ops/state_space_chunks.py`` have."""

from __future__ import annotations

from hetero_megatron.spec.state_space import StateSpace

CHUNK = 64  # tokens, of the state-space rule


def outside_bytes(delta: StateSpace, recompute: str, itemsize: int) -> float:
    """Of all heads, kept outside of the core: what is projected, the gated norm's input and a number of each head, and
    what the projection after it reads, which ``elementwise`` makes again."""
    values = (1 if recompute == "elementwise" else 2) * delta.value_width
    return itemsize * (delta.projected + values) + max(itemsize, 4) * delta.value_heads


def core_bytes(delta: StateSpace, itemsize: int) -> float:
    """Of the core: the convolutions' outputs, and, in at least fp32, per head, what the step size is the softplus of,
    that, and the logarithm of what the state is multiplied with."""
    return itemsize * (2 * delta.key_width + delta.value_width) + max(itemsize, 4) * 3 * delta.value_heads


def carried_token_bytes(delta: StateSpace, itemsize: int) -> tuple[float, float, float]:
    """Of all heads, of a token with a state before its run: (what its query reads of it, the query and the product of
    what multiplied the state, which are kept; bytes per run, of the state; what backward works with)."""
    heads, dk, wide = delta.value_heads, delta.key_dim, max(itemsize, 4)
    kept = itemsize * heads * dk + wide * heads + (wide * delta.key_width if itemsize < wide else 0)
    return kept, wide * heads * dk * delta.value_dim, wide * 2 * heads * dk


def beside_rule_bytes(delta: StateSpace, recompute: str, itemsize: int) -> float:
    """While backward is in the rule, gradients of its output, of the gate, and of x by D, less what the norm and the
    projection after it had kept."""
    return itemsize * delta.value_width * (2 if recompute == "elementwise" else 1)


def rule_backward_bytes(delta: StateSpace, itemsize: int, copied: float = 0.0) -> float:
    """Of backward of the state-space rule, which runs its forward again, in at least fp32, at the worst of its moments
    (``_gradients`` of ``ops/state_space_chunks.py``). In elements per head, r groups of each:

    - all the time B and C, 2 r dk; values, what is written and the output's gradient, 3 dv; two products of pairs,
      2 CHUNK; and 3;
    - one after the other the states before chunks and gradients of those after, dk dv / CHUNK each, with what they are
      made of; products with them; gradients of what is written and of pairs.

    Args:
        copied: key features beside those of the model (``copied_width`` of ``spec/delta_bytes.py``).
    """
    dk, dv, r = delta.key_dim, delta.value_dim, (delta.key_width + copied) / delta.key_dim / delta.value_heads
    states = dk * dv / CHUNK
    chunks = r * 2 * dk + 3 * dv + 2 * CHUNK + 3
    moments = (
        states + 2 * dv, 3 * states + dv + r * dk + 1, states + 2 * dv + 2 * r * dk + 1,
        3 * dv + CHUNK + 2 * r * dk + 2, dv + (2 + r) * CHUNK + 2 * r * dk + 2,
    )  # fmt: skip
    return max(itemsize, 4) * delta.value_heads * (chunks + max(moments))
