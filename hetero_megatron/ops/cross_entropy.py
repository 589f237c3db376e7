"""Cross-entropy per token.

Labels lie in the vocabulary. A token that does not count has a weight of 0 in the loss (``Batch.loss_mask``), no label
of its own: torch's -100, and any other label outside, raises or gives NaN, in every operator of this kind.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

from hetero_megatron.ops.bind import bind
from hetero_megatron.ops.spec import ATEN, Bounds, Case, Kernel, OpSpec, normal, reference_forward, wide

NO_LABEL = -(1 << 62)  # for functions that want a label to ignore: one that no data has


def cross_entropy_reference(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    values = logits.to(wide(logits.dtype))
    losses = F.cross_entropy(values.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=NO_LABEL)
    return losses.view(labels.shape)


def cross_entropy_forward(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Turns the logits into probabilities in place: one [tokens, vocabulary] buffer instead of three."""
    probs = logits.detach().to(wide(logits.dtype))
    probs.sub_(probs.amax(-1, keepdim=True))
    target = probs.gather(-1, labels[..., None])  # after the shift, so that large logits lose no digits
    total = probs.exp_().sum(-1, keepdim=True)
    loss = total.log() - target
    return loss.squeeze(-1), probs, labels, total, logits.new_empty(0)  # the last one remembers the dtype


def cross_entropy_backward(
    grad: torch.Tensor, probs: torch.Tensor, labels: torch.Tensor, total: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor]:
    grad = grad[..., None]
    out = probs.mul_(grad / total)
    out.scatter_add_(-1, labels[..., None], -grad.to(out.dtype))
    return (out.to(like.dtype),)


def _definition(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
    return (cross_entropy_reference(logits, labels),)


def _lse(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
    return (logits.to(wide(logits.dtype)).logsumexp(-1),)


def _reference_backward(
    grad: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor]:
    """(softmax - one-hot) grad, from the log-sum-exp."""
    probs = (logits.to(lse.dtype) - lse[..., None]).exp()
    return (((probs - F.one_hot(labels, logits.shape[-1])) * grad[..., None]).to(logits.dtype),)


def labels_for(shape: tuple[int, ...], vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(sum(shape)))


def _cases() -> Iterable[Case]:
    for name, shape in {
        "plain": (2, 5, 64), "odd": (3, 257), "one word": (4, 1), "no rows": (2, 0, 9), "wide": (3, 20_011),
        "many rows": (65_537, 3),
    }.items():  # fmt: skip
        yield Case(name, (normal(*shape, seed=0, scale=4.0), labels_for(shape[:-1], shape[-1])))
    yield Case("large", (normal(3, 5, 33, seed=1, scale=100.0), labels_for((3, 5), 33)))
    yield Case("equal", (torch.full((2, 8), 7.0, dtype=torch.float64), labels_for((2,), 8)))
    yield Case("part of a wider buffer", (normal(6, 50, seed=2)[1:5, 3:44], labels_for((4,), 41)))


SPEC = OpSpec(
    name="cross_entropy", tensors=("logits", "labels"), options=(), results=("loss",), extras=("lse",),
    saves=("logits", "labels", "lse"), gradients=("logits",), definition=_definition,
    forward=reference_forward(_definition, _lse), backward=_reference_backward,
    fake=lambda logits, labels: tuple(logits.new_empty(labels.shape, dtype=wide(logits.dtype)) for _ in range(2)),
    flops=lambda logits, labels: 4 * logits.numel(), cases=_cases,
    bounds=Bounds((1e-6, 2e-6), (1e-5, 1e-3), (1e-5, 5e-3)), backward_flops=1.0,
    speed=lambda: Case("512x16384", (normal(512, 16_384, seed=0), labels_for((512,), 16_384))),
)  # fmt: skip
KERNELS = (
    Kernel("cross_entropy", "aten", ATEN, cross_entropy_forward, cross_entropy_backward, private=True,
           overwrites=("logits",), traceable=False),
)  # fmt: skip
_apply = bind(SPEC, KERNELS[0])


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log softmax(logits)[label] per token, in at least fp32.

    Args:
        logits: [..., V]; fp32 and fp64 logits are overwritten (nothing else needs them). labels: [...] int64.
            Backward may run once.
    """
    return _apply(logits, labels)  # type: ignore[no-any-return]
