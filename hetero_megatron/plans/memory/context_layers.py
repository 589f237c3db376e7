"""Bytes of activations that layers of context groups keep, by formula, per token and head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.activation_bytes import layer_activation_bytes, turned_copies
from hetero_megatron.spec.flops import attention_layers, linear_layers

KeptWorking = tuple[Any, Any]  # bytes from forward to backward in all layers; more during the backward of one


@dataclass(frozen=True)
class ContextLayers:
    """Layers of a stage with context groups; bytes are of one sequence.

    Args:
        full: how many of the ``layers`` are recomputed whole; ``selective``: of all, the attention core is;
            ``elementwise``: of all, what norms and activations put out.
        item: bytes of an activation; wide: of a gradient of keys and values.
    """

    spec: ModelSpec
    layers: int
    full: int
    selective: bool
    item: int
    wide: int
    elementwise: bool = False

    def per_own_token(self, tp: float, alone: bool) -> float:
        """Kept by a rank with 1/tp of a layer for every token of its member; ``alone``: it is its whole group."""
        queries, _, keys, _ = self._core(self.spec.num_heads, self.spec.num_kv_heads)

        def whole(recompute: str) -> float:
            outside = layer_activation_bytes(self.spec, 4096, recompute, self.item, tp) / 4096
            return outside + self.attention * (self._home(alone) - queries - keys) / tp

        per_layer = whole("elementwise" if self.elementwise else "none")
        if self.linear:
            per_layer += self.linear * self._linear_kept(tp) / tp
        return self.full * self.spec.hidden_size * self.item / tp + (self.layers - self.full) * per_layer

    def per_core_token(self, q: Any, kv: Any) -> tuple[KeptWorking, KeptWorking]:
        """Of the attention core on a rank with ``q`` query heads and ``kv`` KV heads: for every query token of its
        group, and for every token whose keys it has."""
        queries, d_queries, keys, d_keys = self._core(q, kv)
        keeping, recomputes = 0.0 if self.selective else (self.layers - self.full) * self.attention, self.selective
        return (keeping * queries, recomputes * queries + d_queries), (keeping * keys, recomputes * keys + d_keys)

    @cached_property
    def attention(self) -> float:
        """The share of layers with attention; 1 of most models."""
        return attention_layers(self.spec)

    @cached_property
    def linear(self) -> float:
        """The share of layers with linear attention."""
        return linear_layers(self.spec)

    def _linear_kept(self, tp: float) -> float:
        """Per own token of a layer of linear attention, all heads, beside what a rank with whole sequences keeps."""
        from hetero_megatron.spec.delta_bytes import carried_bytes, delta_activation_bytes

        if not self.selective:
            return carried_bytes(self.spec, "none", self.item).token
        selective, none = (delta_activation_bytes(self.spec, kind, self.item, tp) for kind in ("selective", "none"))
        return selective - none

    def states(self, tokens: Any, carried: Any, runs: Any, longest: Any, tp: float = 1.0) -> KeptWorking:
        """Of linear attention, all heads: what is kept in all layers of states that come from other members, and what
        backward of one works with.

        Args:
            tokens: the rank's own; carried: of these, those in runs with a state before them, of which there are
                ``runs``; longest: tokens of its longest run, as backward of the rule is of one after the other.
            tp: the rank has 1/tp of the heads.
        """
        if not self.linear:
            return 0.0, 0.0
        from hetero_megatron.spec.delta_bytes import carried_bytes, delta_backward_bytes

        size = carried_bytes(self.spec, "selective" if self.selective else "none", self.item)
        kept = (self.layers - self.full) * self.linear * (carried * size.carried + runs * size.run)
        in_rule = longest * delta_backward_bytes(self.spec, self.item, tp)
        working = in_rule + tokens * size.again + carried * size.working
        return kept, working

    def blocks(self, kv: Any, block: int) -> Any:
        """Of the ring's buffers: three blocks of keys and values, one that is computed with, one that arrives and the
        parts that it is put together from; and three of gradients, one made, one sent and one that comes."""
        return kv * 2 * self.spec.head_dim * (self.item + self.wide) * 3 * block

    def _core(self, q: Any, kv: Any) -> tuple[Any, Any, Any, Any]:
        """Of one layer's attention core, per query token (queries, output and log-sum-exp; dQ and the output's
        gradient), and per key token (keys and values; their gradients)."""
        d = self.spec.head_dim
        keys, d_keys = 2 * d * self.item * kv, 2 * d * self.wide * kv
        return (2 * d * self.item + 4) * q, d * (self.wide + self.item) * q, keys, d_keys

    def _home(self, alone: bool) -> float:
        """Per own token and layer, over all heads, that attention keeps besides its core: the output before the
        projection (shared with the core where a member is ``alone``); with selective recompute also q, k and v. What is
        exchanged is a copy: nothing keeps what was turned, but what is normed keeps the values that lie beside it."""
        q, kv = self.spec.num_heads * self.spec.head_dim, self.spec.num_kv_heads * self.spec.head_dim
        copied = 0.0 if alone else kv * bool(self.spec.qk_norm) - turned_copies(self.spec) * (q + kv)
        if self.selective:
            return self.item * (2 * q + 2 * kv + copied)
        return self.item * (copied + (0 if alone else q))
