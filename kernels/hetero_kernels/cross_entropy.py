# mypy: allow-untyped-defs, allow-incomplete-defs
"""Cross-entropy per token: one online pass over the logits forward, one read and one write backward.

Only the log-sum-exp per token is saved; backward computes the softmax again. The same kernels serve the
vocabulary-parallel operator: a rank holds columns ``start .. start + v`` of the logits.
"""

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import LN2, LOG2E, finite_or_zero, load_tile, store_tile, tanh, widen
from hetero_kernels.limits import Limits, accumulator, as_rows, flat_tile, limits_of, row_tile, wide


def cross_entropy_reference(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(loss, log-sum-exp) per token in at least fp32; arguments as in :func:`cross_entropy_fwd`."""
    x = logits.to(wide(logits.dtype))
    x = softcap * torch.tanh(x / softcap) if softcap else x
    lse = torch.logsumexp(x, -1)
    kept = target != ignore_index
    picked = x.gather(-1, target.where(kept, 0)[..., None]).squeeze(-1)
    loss = lse - (1 - label_smoothing) * picked
    if label_smoothing:
        loss = loss - label_smoothing * x.mean(-1)
    return (loss + z_loss * lse.square()).where(kept, 0.0), lse


@triton.jit
def _capped(x, SOFTCAP: tl.constexpr):
    if SOFTCAP != 0.0:
        x = SOFTCAP * tanh(x / SOFTCAP)
    return x


@triton.jit(do_not_specialize=["start"])
def _ce_fwd(
    logits_ptr, target_ptr, a_ptr, b_ptr, picked_ptr, rows, width, stride, start, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, STATS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """STATS: (maximum, sum of exp(x - maximum), logit of the target or 0); else (loss, log-sum-exp)."""
    lane = tl.arange(0, BLOCK_C)
    for first in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        row = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
        live = row < rows
        here = logits_ptr + row[:, None] * stride
        top = tl.full([BLOCK_R], float("-inf"), ACC)  # of the logits
        scaled = tl.full([BLOCK_R], float("-inf"), ACC)
        total = tl.zeros([BLOCK_R], ACC)
        plain = tl.zeros([BLOCK_R, BLOCK_C], ACC)
        ahead = tl.load(here + lane[None, :], mask=live[:, None] & (lane < width)[None, :], other=float("-inf"))
        for begin in range(0, width, BLOCK_C):
            raw = ahead  # the next tile is on its way while this one is summed
            col = begin + BLOCK_C + lane
            ahead = tl.load(here + col[None, :], mask=live[:, None] & (col < width)[None, :], other=float("-inf"))
            x = _capped(widen(raw, ACC), SOFTCAP)
            if SOFTCAP != 0.0 or SMOOTHING != 0.0:
                inside = (begin + lane < width)[None, :]
                if SOFTCAP != 0.0:  # which makes a finite number of what lies outside
                    x = tl.where(inside, x, float("-inf"))
                if SMOOTHING != 0.0:
                    plain += tl.where(inside, x, 0.0)
            top = tl.maximum(top, tl.max(x, 1))
            higher = top * LOG2E
            safe = finite_or_zero(higher)
            total = total * tl.exp2(scaled - safe) + tl.sum(tl.exp2(x * LOG2E - safe[:, None]), 1)  # one multiply-add
            scaled = higher
        # The sum is relative to 2 ** scaled, which is exp(top) but for a rounding: that is put right once a row.
        lost = tl.fma(finite_or_zero(top), tl.full([BLOCK_R], LOG2E, ACC), -finite_or_zero(scaled))
        target = tl.load(target_ptr + row, mask=live, other=0)
        kept = live & (target != ignore_index)
        local = target - start
        found = kept & (local >= 0) & (local < width)
        picked = _capped(widen(tl.load(logits_ptr + row * stride + local, mask=found, other=0.0), ACC), SOFTCAP)
        if STATS:
            tl.store(a_ptr + row, top, mask=live)
            tl.store(b_ptr + row, total * tl.exp2(-lost), mask=live)
            tl.store(picked_ptr + row, tl.where(found, picked, 0.0), mask=live)
        else:
            log_total = (tl.log2(tl.where(live, total, 1.0)) - lost) * LN2
            lse = top + log_total
            loss = log_total + (top - picked)
            if SMOOTHING != 0.0:
                loss = (1.0 - SMOOTHING) * loss + SMOOTHING * (lse - tl.sum(plain, 1) / width)
            if Z_LOSS != 0.0:
                loss += Z_LOSS * lse * lse
            loss = tl.where(found, loss, float("nan"))  # a target outside the vocabulary must not pass unseen
            tl.store(a_ptr + row, tl.where(kept, loss, 0.0), mask=live)
            tl.store(b_ptr + row, lse, mask=live)


@triton.jit(do_not_specialize=["start"])
def _ce_bwd(
    dloss_ptr, logits_ptr, target_ptr, lse_ptr, out_ptr, rows, width, stride, out_stride, dloss_stride, start,
    ignore_index, classes, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, BLOCK_C)
    for task in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R) * across, tl.num_programs(0)):
        row = (task // across) * tl.full([], BLOCK_R, tl.int64) + tl.arange(0, BLOCK_R)
        col = (task % across) * BLOCK_C + tl.arange(0, BLOCK_C)
        live, inside = row < rows, col < width
        target = tl.load(target_ptr + row, mask=live, other=0)
        kept = live & (target != ignore_index)
        lse = widen(tl.load(lse_ptr + row, mask=live, other=0.0), ACC)
        dloss = widen(tl.load(dloss_ptr + row * dloss_stride, mask=kept, other=0.0), ACC)
        local = target - start
        local = tl.where(kept & (local >= 0) & (local < width), local, -1).to(tl.int32)
        x = _capped(load_tile(logits_ptr, row, live, col, inside, stride, ACC), SOFTCAP)
        scaled = lse * LOG2E
        lost = tl.fma(lse, tl.full([BLOCK_R], LOG2E, ACC), -scaled)  # in the rounding of scaled
        factor = dloss * tl.exp2(-lost)
        if Z_LOSS != 0.0:
            factor *= 1.0 + 2.0 * Z_LOSS * lse
        scaled = tl.where(kept, scaled, float("inf"))  # a token that does not count has probabilities of 0
        grad = tl.exp2(x * LOG2E - scaled[:, None]) * factor[:, None]
        if SMOOTHING != 0.0:
            grad -= (dloss * (tl.full([], SMOOTHING, ACC) / classes))[:, None]
        grad -= tl.where(col[None, :] == local[:, None], (dloss * (1.0 - SMOOTHING))[:, None], 0.0)
        if SOFTCAP != 0.0:
            grad *= 1.0 - (x / SOFTCAP) * (x / SOFTCAP)
        store_tile(out_ptr, row, live, col, inside, out_stride, grad)


def cross_entropy_fwd(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float = 0.0, limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """logits [..., v], target [...] int64 -> loss [...] and log-sum-exp [...] (saved), both in at least fp32.

    Args:
        ignore_index: tokens with this target have loss 0 and no gradient. Any other target outside 0 .. v - 1
            gives NaN.
        label_smoothing: share of the target's probability that is spread over all classes.
        z_loss: weight of the squared log-sum-exp that is added to the loss.
        softcap: logits become softcap * tanh(logits / softcap) first; 0: they do not.
    """
    limits = limits or limits_of(logits.device)
    loss, lse = (torch.empty(target.shape, dtype=wide(logits.dtype), device=logits.device) for _ in range(2))
    flags = (label_smoothing, z_loss, softcap, False)
    _forward(logits, target, loss, lse, None, 0, ignore_index, flags, limits)
    return loss, lse


def cross_entropy_bwd(
    dloss: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, *, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0, inplace: bool = False,
    limits: Limits | None = None,
) -> torch.Tensor:  # fmt: skip
    """dloss [...] (may be an expanded scalar) -> dlogits in logits' dtype; ``inplace``: in the logits' memory."""
    limits = limits or limits_of(logits.device)
    flags = (label_smoothing, z_loss, softcap)
    return _backward(
        dloss, logits, target, lse, 0, ignore_index, logits.shape[-1], flags, _output(logits, inplace), limits
    )


def _output(logits: torch.Tensor, inplace: bool) -> torch.Tensor:
    return logits if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _forward(
    logits: torch.Tensor, target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, picked: torch.Tensor | None,
    start: int, ignore_index: int, flags: tuple[float, float, float, bool], limits: Limits,
) -> None:  # fmt: skip
    if target.numel() == 0:
        return
    flat = as_rows(logits)
    rows, width = flat.shape
    tile = row_tile("cross_entropy_fwd", rows, max(width, 1), logits.dtype, limits)
    _ce_fwd[tile.grid](
        flat, target.contiguous(), a, b, picked, rows, width, flat.stride(0), start, ignore_index, *flags,
        accumulator(logits.dtype), tile.block_rows, tile.block_cols, num_warps=tile.num_warps,
    )  # fmt: skip


def _backward(
    dloss: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, start: int, ignore_index: int,
    classes: int, flags: tuple[float, float, float], out: torch.Tensor, limits: Limits,
) -> torch.Tensor:  # fmt: skip
    flat = as_rows(logits)
    if out.numel() == 0:
        return out
    rows_out = out.view(flat.shape)  # also where it is the logits: they must be viewable as rows
    grad = dloss.expand(target.shape).reshape(-1)
    rows, width = flat.shape
    tile = flat_tile("cross_entropy_bwd", rows, width, logits.dtype, limits)
    _ce_bwd[tile.grid](
        grad, flat, target.contiguous(), lse.contiguous(), rows_out, rows, width, flat.stride(0),
        rows_out.stride(0), grad.stride(0), start, ignore_index, classes, *flags,
        accumulator(logits.dtype), tile.block_rows, tile.block_cols, num_warps=tile.num_warps,
    )  # fmt: skip
    return out
