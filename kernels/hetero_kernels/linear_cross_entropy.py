"""The output projection and its cross-entropy without the logits: they exist for one chunk of tokens at a time.

The products are the chip's own GEMM (which no Triton kernel of ours beats); the softmax, its loss and its gradient
are the kernels of cross_entropy.py. Logits of 16-bit inputs are in fp32, as is the sum of the weight gradient over
the chunks: 16 bits there are what makes other fused versions diverge.
"""

from __future__ import annotations

import functools

import torch

from hetero_kernels.cross_entropy import _backward, _forward
from hetero_kernels.limits import Limits, cdiv, config, limits_of, wide


def linear_cross_entropy_reference(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, log-sum-exp) per token of the logits x weight^T, in at least fp32. For the whole vocabulary."""
    logits = x.to(wide(x.dtype)) @ weight.to(wide(x.dtype)).t()
    kept = target != ignore_index
    picked = logits.gather(-1, target.where(kept, 0)[..., None]).squeeze(-1)
    lse = torch.logsumexp(logits, -1)
    return (lse - picked).where(kept, 0.0), lse


@functools.cache
def _mixed_products(device_type: str) -> bool:
    """Whether aten there multiplies 16-bit matrices into fp32: not on the CPU, nor in the adapters of all vendors."""
    has, key = torch._C._dispatch_has_kernel_for_dispatch_key, torch._C._dispatch_key_for_device(device_type)
    names = ("aten::mm.dtype_out", "aten::addmm.dtype_out")
    return hasattr(torch.ops.aten.mm, "dtype_out") and all(has(name, key) for name in names)


def _gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
    """out (+)= a b, accumulated in at least fp32; 16-bit operands may have an fp32 ``out``."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif not _mixed_products(a.device.type):
        _gemm(a.to(out.dtype), b.to(out.dtype), out, add)
    elif add:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


class _Chunks:
    """Walks over the tokens; one buffer of logits for all chunks."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, chunk: int | None, limits: Limits):
        self.x, self.target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        self.weight, self.limits = weight, limits
        tokens, vocabulary = self.target.shape[0], weight.shape[0]
        if chunk is None:
            logit_bytes = config("linear_cross_entropy", vocabulary, x.dtype, limits)["logit_bytes"]
            fitting = max(logit_bytes // (max(vocabulary, 1) * (wide(x.dtype).itemsize + x.dtype.itemsize)), 1)
            chunk = cdiv(tokens, cdiv(tokens, fitting)) if tokens else 1  # equal chunks
            chunk = min(cdiv(chunk, 128) * 128, tokens)  # a GEMM likes whole tiles
        self.starts = range(0, tokens, max(chunk, 1))
        self.chunk = chunk
        self.buffer = torch.empty((min(chunk, tokens), vocabulary), dtype=wide(x.dtype), device=x.device)

    def __iter__(self):  # type: ignore[no-untyped-def]
        for start in self.starts:
            part = slice(start, start + self.chunk)
            x, target = self.x[part], self.target[part]
            logits = self.buffer[: x.shape[0]]
            _gemm(x, self.weight.t(), logits)
            yield part, x, target, logits


def linear_cross_entropy_fwd(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, chunk: int | None = None,
    limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """x [..., h], weight [v, h], target [...] int64 -> loss [...], log-sum-exp [...] (saved), in at least fp32.

    ``chunk``: tokens whose logits exist at a time (default: the tuning table's bytes).
    """
    limits = limits or limits_of(x.device)
    loss, lse = (torch.empty(target.numel(), dtype=wide(x.dtype), device=x.device) for _ in range(2))
    for part, _, labels, logits in _Chunks(x, weight, target, chunk, limits):
        _forward(logits, labels, loss[part], lse[part], None, 0, ignore_index, (0.0, 0.0, 0.0, False), limits)
    return loss.view(target.shape), lse.view(target.shape)


def linear_vocab_stats(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, vocab_start: int, *, ignore_index: int = -100,
    chunk: int | None = None, limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As vocab_stats, of the logits x weight^T of this rank's rows vocab_start .. of the projection."""
    limits = limits or limits_of(x.device)
    stats = [torch.empty(target.numel(), dtype=wide(x.dtype), device=x.device) for _ in range(3)]
    if weight.shape[0] == 0:
        stats = [stats[0].fill_(float("-inf")), stats[1].zero_(), stats[2].zero_()]
    else:
        for part, _, labels, logits in _Chunks(x, weight, target, chunk, limits):
            top, total, picked = (s[part] for s in stats)
            flags = (0.0, 0.0, 0.0, True)
            _forward(logits, labels, top, total, picked, vocab_start, ignore_index, flags, limits)
    return tuple(s.view(target.shape) for s in stats)  # type: ignore[return-value]


def linear_cross_entropy_bwd(
    dloss: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, *,
    vocab_start: int = 0, ignore_index: int = -100, grad_weight: torch.Tensor | None = None, accumulate: bool = True,
    chunk: int | None = None, limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> dx in x's dtype, dweight [v, h] in at least fp32. The logits are made again: 4 GEMMs with forward's.

    Args:
        dloss: [...] (may be an expanded scalar).
        lse: [...] over the whole vocabulary; ``weight`` may be the rows vocab_start .. of it (dx is then this rank's
            share of a sum).
        grad_weight: at least fp32 [v, h]; the gradient is added to it, and it is what is returned.
        accumulate: False: ``grad_weight`` has no value yet, and is overwritten.
    """
    limits = limits or limits_of(x.device)
    walk = _Chunks(x, weight, target, chunk, limits)
    dx, dw, dlogits = _gradient_buffers(walk, grad_weight)
    add = accumulate and grad_weight is not None
    scales, stats = dloss.expand(target.shape).reshape(-1), lse.reshape(-1)
    for part, inputs, labels, logits in walk:
        _chunk_gradient(
            scales[part], stats[part], inputs, labels, logits, weight, dx[part], dw, dlogits, add or part.start > 0,
            vocab_start, ignore_index, limits,
        )  # fmt: skip
    return dx.view(x.shape), dw if add or len(walk.target) else dw.zero_()


def linear_cross_entropy_fwd_bwd(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, *, ignore_index: int = -100,
    grad_weight: torch.Tensor | None = None, accumulate: bool = True, chunk: int | None = None,
    limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Loss and gradients in one go, 3 GEMMs: for where the gradient of each token's loss is known beforehand.

    -> loss [...], log-sum-exp [...], dx, dweight as above. If the loss is scaled later, so must the gradients be.
    """
    limits = limits or limits_of(x.device)
    loss, lse = (torch.empty(target.numel(), dtype=wide(x.dtype), device=x.device) for _ in range(2))
    walk = _Chunks(x, weight, target, chunk, limits)
    dx, dw, dlogits = _gradient_buffers(walk, grad_weight)
    add = accumulate and grad_weight is not None
    scales = dloss.expand(target.shape).reshape(-1)
    for part, inputs, labels, logits in walk:
        _forward(logits, labels, loss[part], lse[part], None, 0, ignore_index, (0.0, 0.0, 0.0, False), limits)
        _chunk_gradient(
            scales[part], lse[part], inputs, labels, logits, weight, dx[part], dw, dlogits, add or part.start > 0, 0,
            ignore_index, limits,
        )  # fmt: skip
    dw = dw if add or len(walk.target) else dw.zero_()
    return loss.view(target.shape), lse.view(target.shape), dx.view(x.shape), dw


def _gradient_buffers(
    walk: _Chunks, grad_weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dx, dweight, dlogits of one chunk in x's dtype; None: in the memory of the logits)"""
    x, weight = walk.x, walk.weight
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if grad_weight is None:
        grad_weight = torch.empty(weight.shape, dtype=wide(weight.dtype), device=x.device)
    assert grad_weight.shape == weight.shape and grad_weight.dtype == wide(grad_weight.dtype), (
        "grad_weight: fp32 [v, h]"
    )
    same = walk.buffer.dtype == x.dtype
    return dx, grad_weight, None if same else torch.empty(walk.buffer.shape, dtype=x.dtype, device=x.device)


def _chunk_gradient(
    dloss: torch.Tensor, lse: torch.Tensor, x: torch.Tensor, target: torch.Tensor, logits: torch.Tensor,
    weight: torch.Tensor, dx: torch.Tensor, dw: torch.Tensor, dlogits: torch.Tensor | None, add: bool,
    vocab_start: int, ignore_index: int, limits: Limits,
) -> None:  # fmt: skip
    out = logits if dlogits is None else dlogits[: logits.shape[0]]
    _backward(dloss, logits, target, lse, vocab_start, ignore_index, 1, (0.0, 0.0, 0.0), out, limits)
    _gemm(out, weight, dx)
    _gemm(out.t(), x, dw, add)
