"""One rank's part of cross-entropy over a vocabulary that is cut, evenly or not, over a tensor-parallel group.

``forward`` gives three numbers per token, which the group combines; ``backward`` gets (grad, saved, labels, peak,
normalizer, start) with the combined peak and normalizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from hetero_megatron.ops.cross_entropy import labels_for
from hetero_megatron.ops.spec import ATEN, Bounds, Case, Kernel, OpSpec, normal, reference_forward, wide


def definition(logits: torch.Tensor, labels: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
    """The local statistics, in at least fp32.

    Args:
        logits: [..., V_local], columns ``[start, start + V_local)`` of the full logits; V_local may be 0.
        labels: [...] int64 in the full vocabulary.

    Returns:
        top: largest local logit (-inf where there is none); total: sum of exp(logit - top); target: the label's
        logit minus top, 0 where the label is elsewhere. Each [...].
    """
    values = logits.to(wide(logits.dtype))
    if logits.shape[-1] == 0:
        top = values.new_full(labels.shape, -math.inf)
        return top, torch.zeros_like(top), torch.zeros_like(top)
    top = values.amax(-1)
    is_local, local = _local(labels, start, logits.shape[-1])
    shifted = values - top[..., None]
    target = torch.where(is_local, shifted.gather(-1, local[..., None]).squeeze(-1), 0.0)
    return top, shifted.exp().sum(-1), target


def gradient(
    grad: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, peak: torch.Tensor, normalizer: torch.Tensor,
    start: int,
) -> tuple[torch.Tensor]:  # fmt: skip
    """(softmax - one-hot) grad for the local columns; peak, normalizer: over the whole vocabulary."""
    probs = (logits.to(wide(logits.dtype)) - peak[..., None]).exp_().mul_((grad / normalizer)[..., None])
    if logits.shape[-1] > 0:
        is_local, local = _local(labels, start, logits.shape[-1])
        probs.scatter_add_(-1, local[..., None], torch.where(is_local, -grad, 0.0).to(probs.dtype)[..., None])
    return (probs.to(logits.dtype),)


def statistics(logits: torch.Tensor, labels: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
    """The definition in place: full-precision logits become exp(logit - top), which backward needs."""
    like = logits.new_empty(0)  # remembers the dtype
    if logits.shape[-1] == 0:
        top, total, target = definition(logits, labels, start)
        return top, total, target, logits.to(wide(logits.dtype)), like, top
    values = logits.detach().to(wide(logits.dtype))
    top = values.amax(-1)
    values.sub_(top[..., None])
    is_local, local = _local(labels, start, logits.shape[-1])
    target = torch.where(is_local, values.gather(-1, local[..., None]).squeeze(-1), 0.0)
    return top, values.exp_().sum(-1), target, values, like, top


def gradient_in_place(
    grad: torch.Tensor, values: torch.Tensor, like: torch.Tensor, top: torch.Tensor, labels: torch.Tensor,
    peak: torch.Tensor, normalizer: torch.Tensor, start: int,
) -> tuple[torch.Tensor]:  # fmt: skip
    if values.shape[-1] > 0:
        values.mul_(((top - peak).exp() / normalizer * grad)[..., None])
        is_local, local = _local(labels, start, values.shape[-1])
        values.scatter_add_(-1, local[..., None], torch.where(is_local, -grad, 0.0).to(values.dtype)[..., None])
    return (values.to(like.dtype),)


def _local(labels: torch.Tensor, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (labels >= start) & (labels < start + size), (labels - start).clamp(0, size - 1)


def _cases() -> Iterable[Case]:
    for name, shape, vocabulary, start in (
        ("first shard", (2, 5, 16), 40, 0), ("odd shard", (2, 5, 13), 40, 16), ("last, one word", (7, 1), 40, 39),
        ("empty shard", (2, 3, 0), 40, 20), ("no rows", (0, 8), 40, 8), ("labels all elsewhere", (4, 8), 8, 8),
        ("many rows", (65_537, 2), 6, 2),
    ):  # fmt: skip
        yield Case(name, (normal(*shape, seed=0, scale=4.0), labels_for(shape[:-1], vocabulary), start))


def _fake(logits: torch.Tensor, labels: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
    return tuple(logits.new_empty(labels.shape, dtype=wide(logits.dtype)) for _ in range(3))


SPEC = OpSpec(
    name="vocab_cross_entropy", tensors=("logits", "labels"), options=("start",), schema=None,
    results=("top", "total", "target"), definition=definition, forward=reference_forward(definition),
    backward=gradient, split=True, saves=("logits",), gradients=("logits",), fake=_fake,
    flops=lambda logits, labels, start: 4 * logits.numel(), cases=_cases,
    bounds=Bounds((1e-6, 2e-6), (1e-5, 1e-3), (1e-5, 5e-3)), backward_flops=1.0,
    speed=lambda: Case("512x8192", (normal(512, 8192, seed=0), labels_for((512,), 16_384), 4096)),
)  # fmt: skip
KERNELS = (
    Kernel("vocab_cross_entropy", "aten", ATEN, statistics, gradient_in_place, private=True, overwrites=("logits",)),
)
