"""The output head and its loss in one: logits exist for a chunk of tokens at a time, never for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from hetero_megatron.ops.cross_entropy import cross_entropy_reference, labels_for
from hetero_megatron.ops.kernel import ATEN, Kernel
from hetero_megatron.ops.spec import Bounds, Case, OpSpec, autograd_backward, normal, reference_forward, wide

CHUNK_ELEMENTS = 1 << 22  # logits at once; 16 MiB in fp32, small beside weights, large enough for the product


def definition(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
    """Cross-entropy of x W^T per token, in at least fp32. x: [..., h]; weight: [V, h]; labels: [...] int64."""
    kind = wide(x.dtype)
    return (cross_entropy_reference(x.to(kind) @ weight.to(kind).t(), labels),)


def _chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(vocabulary, 1))
    return (slice(i, min(i + rows, tokens)) for i in range(0, tokens, rows))


def forward(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, log-sum-exp), each [...]. 16-bit products are rounded to 16 bits, as the unfused head's are."""
    kind = wide(x.dtype)
    flat, targets = x.flatten(0, -2), labels.flatten()
    loss, lse = flat.new_empty(len(flat), dtype=kind), flat.new_empty(len(flat), dtype=kind)
    for part in _chunks(len(flat), len(weight)):
        logits = _logits(flat[part], weight, kind)
        lse[part] = logits.logsumexp(-1)
        loss[part] = lse[part] - logits.gather(-1, targets[part, None]).squeeze(-1)
    return loss.view(labels.shape), lse.view(labels.shape)


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the logits again; the weight gradient is summed over chunks in at least fp32."""
    kind = wide(x.dtype)
    flat, targets, total = x.flatten(0, -2), labels.flatten(), lse.flatten()
    dx = torch.empty_like(flat)
    dw = torch.zeros_like(weight, dtype=kind)
    seeds = grad.flatten()
    for part in _chunks(len(flat), len(weight)):
        logits = _logits(flat[part], weight, kind)
        probs = logits.sub_(total[part, None]).exp_().mul_(seeds[part, None])
        probs.scatter_add_(-1, targets[part, None], -seeds[part, None].to(kind))
        dx[part] = (probs @ weight.to(kind)).to(dx.dtype)
        dw.addmm_(probs.t(), flat[part].to(kind))
    return dx.view(x.shape), dw.to(weight.dtype)


def _logits(x: torch.Tensor, weight: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return x.to(kind) @ weight.to(kind).t()


def _lse(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
    kind = wide(x.dtype)
    return ((x.to(kind) @ weight.to(kind).t()).logsumexp(-1),)


def _cases() -> Iterable[Case]:
    for name, lead, h, v in (
        ("plain", (2, 5), 16, 64), ("odd", (7,), 13, 37), ("one word", (3,), 8, 1), ("no rows", (2, 0), 8, 9),
        ("one row", (1,), 4, 5000), ("several chunks", (300,), 4, 20_000),
        ("many rows", (65_537,), 2, 3),
    ):  # fmt: skip
        yield Case(name, (normal(*lead, h, seed=1), normal(v, h, seed=2), labels_for(lead, v)))


SPEC = OpSpec(
    name="linear_cross_entropy", tensors=("x", "weight", "labels"), options=(), results=("loss",), extras=("lse",),
    saves=("x", "weight", "labels", "lse"), gradients=("x", "weight"), definition=definition,
    forward=reference_forward(definition, _lse),
    backward=autograd_backward(definition, lambda x, w, labels, lse: (x, w, labels), 1, (0, 1)),
    fake=lambda x, w, labels: tuple(x.new_empty(labels.shape, dtype=wide(x.dtype)) for _ in range(2)),
    flops=lambda x, w, labels: 2 * x.numel() * w.shape[0], cases=_cases, backward_flops=3.0,
    bounds=Bounds((1e-6, 1e-5), (1e-4, 2e-3), (1e-4, 6e-3)),
    speed=lambda: Case("256x256x8192", (normal(256, 256, seed=1), normal(8192, 256, seed=2), labels_for((256,), 8192))),
)  # fmt: skip
KERNELS = (Kernel("linear_cross_entropy", "aten", ATEN, forward, backward, traceable=True),)
