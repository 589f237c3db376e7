"""Bytes per token that a layer of Gated DeltaNet keeps from forward to backward, and needs in backward, as plain
formulas: what ``model/gated_delta_net.py`` and ``ops/gated_delta_chunks.py`` have."""

from __future__ import annotations

from hetero_megatron.spec.model_spec import ModelSpec

CHUNK = 64  # tokens, of the gated delta rule


def delta_activation_bytes(spec: ModelSpec, recompute: str, itemsize: int) -> float:
    """Of all heads:

    - what is projected; the gated norm's input and output, and what the projection after it reads, 3 v;
    - the convolutions' outputs, 2 k + v, and, per value head, how much is written;
    - in at least fp32, per value head: what decay is the softplus of, that, and the decay; and a norm's number.

    ``selective`` recomputes the second and third but for the norm's number, ``elementwise`` what the last projection
    reads.
    """
    delta, wide = spec.delta, max(itemsize, 4)
    assert delta is not None
    v, heads = delta.value_width, delta.value_heads
    core = itemsize * (2 * delta.key_width + v + heads) + wide * 3 * heads
    outside = itemsize * (delta.projected + (2 if recompute == "elementwise" else 3) * v) + wide * heads
    return outside + (0 if recompute == "selective" else core)


def delta_backward_bytes(spec: ModelSpec, itemsize: int) -> float:
    """Of backward of the gated delta rule, which runs its forward again, in at least fp32; per value head states and
    their gradients of each chunk, 2 dk dv / CHUNK, of products inside a chunk 6 CHUNK, and of keys and values
    7 dk + 7 dv."""
    delta = spec.delta
    assert delta is not None
    dk, dv = delta.key_dim, delta.value_dim
    return max(itemsize, 4) * delta.value_heads * (2 * dk * dv / CHUNK + 6 * CHUNK + 7 * (dk + dv))


def delta_operands(spec: ModelSpec) -> int:
    """Elements of operands of weight gradients: those of all that is projected, and what the last projection reads."""
    assert spec.delta is not None
    return spec.delta.projected + spec.delta.value_width
