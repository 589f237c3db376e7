"""What a rank needs in memory, by formula: the one set that planning, prediction and training use. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from hetero_megatron.spec import ModelSpec, Share, shares, stage_tensors, tensor_box
from hetero_megatron.spec.flops import head_activation_bytes, layer_activation_bytes

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes of one rank.

    Attributes:
        weights: parameters; gradients: accumulated, in at least fp32.
        optimizer: moments, and fp32 masters of 16-bit weights, of the elements that the rank owns.
        activations: kept for backward by all micro-batches in flight, and what one layer needs while it runs again.
        buffers: gradients packed, received and summed when they travel.
        overhead: of the framework, before the first tensor.
        host: fp32 masters and moments of an offloaded optimizer: in the host's memory, so not part of ``total``.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    overhead: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        # Buckets travel when most activations of the last micro-batch are gone.
        state = self.weights + self.gradients + self.optimizer
        return self.overhead + state + max(self.activations, self.buffers)

    def parts(self) -> dict[str, int]:
        """What ``total`` is made of."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "host"}


def kept_bytes(
    spec: ModelSpec, layers: int, head: bool, recompute: str, first: int, tokens: int, item: int, tp: float
) -> int:
    """Bytes that one micro-batch keeps in a stage from forward to backward.

    Args:
        recompute: none | selective | full | first; ``first`` layers are recomputed whole where it says so.
        tokens: rows x sequence length on this rank's unit; tp: the rank has 1/tp of heads and columns.
    """
    full = {"full": layers, "first": first}.get(recompute, 0)
    rest = "selective" if recompute == "selective" else "none"
    total = full * layer_activation_bytes(spec, tokens, "full", item, tp)
    total += (layers - full) * layer_activation_bytes(spec, tokens, rest, item, tp)
    return total + (head_activation_bytes(spec, tokens, item, tp) if head else 0)


def working_bytes(spec: ModelSpec, layers: int, recompute: str, first: int, tokens: int, item: int, tp: float) -> int:
    """Bytes of one layer that runs again in backward, where any is recomputed whole."""
    full = {"full": layers, "first": first}.get(recompute, 0)
    return layer_activation_bytes(spec, tokens, "none", item, tp) if full else 0


def activation_bytes(
    spec: ModelSpec,
    layers: int,
    head: bool,
    recompute: str,
    first: int,
    tokens: int,
    in_flight: int,
    item: int,
    tp: float,
) -> int:
    """Bytes of activations of ``in_flight`` micro-batches and of the layer that is being recomputed."""
    kept = kept_bytes(spec, layers, head, recompute, first, tokens, item, tp)
    return in_flight * kept + working_bytes(spec, layers, recompute, first, tokens, item, tp)


def held_elements(spec: ModelSpec, layers: int, embed: bool, head: bool, share: Share) -> int:
    """Parameters that a rank holds; all decoder layers are alike."""
    return layers * _elements(spec, "layer", share) + _elements(spec, _ends(embed, head), share)


def _ends(embed: bool, head: bool) -> str:
    return ("embed" if embed else "") + ("head" if head else "")


@lru_cache(maxsize=4096)
def _elements(spec: ModelSpec, what: str, share: Share) -> int:
    layers: Iterable[int] = (0,) if what == "layer" else ()
    return sum(tensor_box(t, share).size for t in stage_tensors(spec, layers, "embed" in what, "head" in what))


@lru_cache(maxsize=4096)
def largest_elements(spec: ModelSpec, embed: bool, head: bool, share: Share) -> int:
    """Elements of the largest tensor (part) that a rank with a decoder layer holds."""
    return max(tensor_box(t, share).size for t in stage_tensors(spec, (0,), embed, head))


@lru_cache(maxsize=1024)
def equal_shares(spec: ModelSpec, tp: int) -> tuple[Share, ...]:
    """The distinct shares of an equal split over ``tp`` ranks."""
    return tuple(dict.fromkeys(shares(spec, (1,) * tp)))


def host_bytes(owned: float, moments: int = 2) -> int:
    """Of an offloaded optimizer: masters are copies in fp32 whatever the dtype of the weights, and so are moments."""
    return round(4 * owned * (moments + 1))


def state_bytes(held: int, owned: float, group: float, item: int, moments: int = 2) -> tuple[int, int, int, int]:
    """(weights, gradients, optimizer, buffers) of a rank.

    Args:
        held, owned: elements; group: ranks that hold the same (buckets go to and from all of them at once).
    """
    wide = max(item, 4)
    master = 4 if item == 2 else 0
    buffers = buffer_bytes(held, owned, group, item)
    return held * item, held * wide, round(owned * (moments * wide + master)), round(buffers)


def buffer_bytes(held: Any, owned: Any, group: float, item: int) -> Any:
    """Of a bucket under way, or of several in arrays: packed for the owners, received from the holders, the sum."""
    return max(item, 4) * (held - owned + owned * (group - 1) + owned) if group > 1 else 0 * held
