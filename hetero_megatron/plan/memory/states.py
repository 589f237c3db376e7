"""Bytes of a rank's weights, gradients, optimizer and buckets under way, by formula."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from hetero_megatron.spec import LogicalTensor, Share, tensor_box

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
ADAM_MOMENTS = 2
SCALE_BYTES = 4  # of an output channel of a weight in 8 bits, fp32


def moments_of(optimizer: str) -> int:
    """What ``--optimizer`` keeps per element, beside the master."""
    return ADAM_MOMENTS if optimizer == "adam" else 1


def cannot_offload(moments: int, dtype: str) -> tuple[str, str] | None:
    """(why an optimizer cannot be in host memory, flags of what can), None where it can."""
    if moments != ADAM_MOMENTS:
        return "only Adam runs in host memory", "--optimizer adam"
    if dtype == "fp64":
        return "the update in host memory is fp32", "--bf16, --fp16 or fp32"
    return None


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes of one rank.

    Attributes:
        weights: parameters; gradients: accumulated, in at least fp32.
        optimizer: moments, and fp32 masters of 16-bit weights, of the elements that the rank owns.
        activations: kept for backward by all micro-batches in flight, what backward works with, and what is on its way
            between stages.
        buffers: gradients packed, received and summed when they travel.
        overhead: of the framework, before the first tensor.
        communicators: buffers of the communication library.
        graphs: memory of device graphs beside the activations, which then are there all step long, too.
        host: fp32 masters and moments of an offloaded optimizer: in the host's memory, so not part of ``total``.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    overhead: int = 0
    host: int = 0
    communicators: int = 0
    graphs: int = 0

    @property
    def lasting(self) -> int:
        """What is there all step long."""
        return self.overhead + self.communicators + self.weights + self.gradients + self.optimizer + self.graphs

    @property
    def total(self) -> int:
        if self.graphs:
            return self.lasting + self.activations + self.buffers
        # Buckets travel when most activations of the last micro-batch are gone.
        return self.lasting + max(self.activations, self.buffers)

    def parts(self) -> dict[str, int]:
        """What ``total`` is made of."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "host"}

    @property
    def largest(self) -> str:
        """The part that is most of it."""
        parts = self.parts()
        return max(parts, key=parts.__getitem__)


def saved_in_int8(tensors: Iterable[LogicalTensor], share: Share, item: int) -> int:
    """Bytes that those of a rank's tensors that are in 8 bits take less than ``item`` per element."""
    boxes = (tensor_box(t, share) for t in tensors if t.int8)
    return sum(box.size * (item - 1) - SCALE_BYTES * math.prod(box.shape[:-1]) for box in boxes)


def host_bytes(owned: float, moments: int = 2) -> int:
    """Of an offloaded optimizer: masters are copies in fp32 whatever the dtype of the weights, and so are moments."""
    return round(4 * owned * (moments + 1))


def state_bytes(
    held: int, owned: float, item: int, moments: int = 2, trained: int | None = None, saved: int = 0
) -> tuple[int, int, int]:
    """(weights, gradients, optimizer) of a rank that holds and owns so many elements; ``trained``: of those held, None:
    all; ``saved``: bytes, by weights in 8 bits."""
    wide = max(item, 4)
    master = 4 if item == 2 else 0
    return held * item - saved, (held if trained is None else trained) * wide, round(owned * (moments * wide + master))


def buffer_bytes(held: Any, owned: Any, copies: float, item: int, dense: bool) -> tuple[Any, Any]:
    """Of a bucket that several ranks hold, on one of them or on several in arrays: (while it is under way, while what
    came is added up).

    Gradients of a dense bucket leave from where they are kept, and their sums lie there: only what comes needs memory,
    and of more than two ranks it comes in one piece with the own part. Else they are packed, and sums are new.

    Args:
        held, owned: elements; copies: ranks that hold the same ones.
    """
    wide, taken = max(item, 4), owned * (copies - 1)
    if dense:
        come = wide * (taken + (owned if copies > 2 else 0))
        return come, come
    return wide * (held - owned + taken), wide * (taken + owned)
