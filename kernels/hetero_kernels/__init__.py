"""Triton kernels for training, one operator per file beside its torch reference. Imports torch and triton only.

Plain functions on tensors, forward and backward each; no autograd inside. Every function takes ``limits=None``
(:class:`Limits`, detected from the device). Arithmetic is in fp32 (fp64 on fp64 tensors), results are rounded once.
Inputs may be views; outputs are contiguous. On the CPU set TRITON_INTERPRET=1 before importing this package.
``[...]`` are any leading axes; "saved" is what backward needs besides the inputs.

    rms_norm_fwd(x, weight|None, eps, *, zero_centered=False) -> y, rstd
    rms_norm_bwd(dy, x, weight|None, rstd, *, zero_centered=False, grad_dtype=None) -> dx, dweight|None
    add_rms_norm_fwd(x, residual, weight|None, eps, *, zero_centered=False) -> y, residual_out, rstd
    add_rms_norm_bwd(dy, dresidual_out|None, residual_out, weight|None, rstd, *, zero_centered=False, grad_dtype=None)
        -> dx (= dresidual), dweight|None
    layer_norm_fwd(x, weight|None, bias|None, eps) -> y, mean, rstd
    layer_norm_bwd(dy, x, weight|None, mean, rstd, *, bias=True, grad_dtype=None) -> dx, dweight|None, dbias|None
    rope_fwd(q[..., hq, d], k|None, cos[..., r/2], sin, *, positions=None, interleaved=False, inplace=False) -> q', k'
    rope_bwd(dq, dk|None, cos, sin, *, positions=None, interleaved=False, inplace=False) -> dq, dk
    swiglu_fwd(gate, up, *, limit=None, alpha=1.0, shift=0.0) -> y
    swiglu_bwd(dy, gate, up, *, limit=None, alpha=1.0, shift=0.0, packed=False) -> dgate, dup
    gelu_fwd(x, *, approximate=False) -> y            (approximate: the tanh form)
    gelu_bwd(dy, x, *, approximate=False) -> dx
    softmax_fwd(x, *, scale=1.0, mask=None, causal=False, diagonal=0) -> y
    softmax_bwd(dy, y, *, scale=1.0) -> dx
    cross_entropy_fwd(logits[..., v], target[...], *, ignore_index=-100, label_smoothing=0., z_loss=0., softcap=0.)
        -> loss[...], lse[...]
    cross_entropy_bwd(dloss, logits, target, lse, *, <same>, inplace=False) -> dlogits
    vocab_stats(logits[..., v_local], target, vocab_start, *, ignore_index=-100) -> maximum, sum_exp, target_logit
    merge_stats([(maximum, sum_exp, target_logit), ...]) -> loss, lse
    vocab_stats_bwd(dloss, logits, target, vocab_start, lse, *, ignore_index=-100, inplace=False) -> dlogits
    linear_cross_entropy_fwd(x[..., h], weight[v, h], target[...], *, ignore_index=-100, chunk=None)
        -> loss[...], lse[...]                        (the logits are never there as a whole)
    linear_cross_entropy_bwd(dloss, x, weight, target, lse, *, vocab_start=0, ignore_index=-100, grad_weight=None,
        accumulate=True) -> dx, dweight               (dweight is fp32; grad_weight: fp32 [v, h] to add to, returned)
    linear_cross_entropy_fwd_bwd(x, weight, target, dloss, *, ignore_index=-100, grad_weight=None, accumulate=True)
        -> loss, lse, dx, dweight                     (3 GEMMs instead of 4, where dloss is known in forward)
    linear_vocab_stats(x, weight[v_local, h], target, vocab_start, *, ignore_index=-100)
        -> maximum, sum_exp, target_logit
    attention_fwd(q[b, sq, hq, d], k[b, sk, hkv, d], v[b, sk, hkv, dv], *, scale=None, causal=True, q_start=0,
        k_start=0, window=None, bounds=None) -> out[b, sq, hq, dv], lse[b, hq, sq]
        (natural log; rows that see nothing: out 0, lse -inf; causal: k_start + j <= q_start + i;
         window: a token sees itself and window - 1 before it; bounds: see document_bounds, varlen_bounds)
    attention_bwd(dout, q, k, v, out, lse, *, delta=None, grad_dtype=None, <same>) -> dq, dk, dv
        (attention's dropout=AttentionDropout(dropped, key, sample, head, q_start, k_start), and softcap=)
    dropout(x[b, s, f], tokens[s], *, dropped, key, sample=0, feature=0) -> y; backward is the same of dy
    document_bounds(documents, sq, device, ...) / varlen_bounds(cu_seqlens_q, cu_seqlens_k, ...) -> bounds[b, 2, sq]
    KeyIntervals(bounds, sk, offset=0, causal=True, window=None): prepared once, for bounds= of many calls
    attention_delta(dout, out) -> delta[b, hq, sq]
    attention_merge(out_a, lse_a, out_b, lse_b) -> out, lse
    gated_delta_fwd(q[b, s, hk, dk], k, v[b, s, hv, dv], g[b, s, hv], beta, state[b, hv, dk, dv]|None, *,
        documents=None, eps=1e-6) -> out[b, s, hv, dv], last[b, hv, dk, dv]
        (documents: document_numbers(documents, s, device) -> int32[b, s])
    gated_delta_bwd(dout, dlast, q, k, v, g, beta, state|None, *, <same>) -> dq, dk, dv, dg, dbeta, dstate|None
    state_space_fwd(q[b, s, groups, dk], k, v[b, s, h, dv], g[b, s, h], write, state[b, h, dk, dv]|None, *,
        documents=None) -> out[b, s, h, dv], last[b, h, dk, dv]
    state_space_bwd(dout, dlast, q, k, v, g, write, state|None, *, <same>) -> dq, dk, dv, dg, dwrite, dstate|None
    quantise_fp8(x[b, rows, n], kind, largest[b], turned) -> (fp8, scales)   (one pass; turned: [b, n, rows])
    quantise_fp8_blocks(x[rows, n], kind, blocks) -> (fp8, scales)   (blocks: 1x128, 128x128, 128x1)
    gemm_fp8_blocks(a[m, k], a_scale[m, k/128], b[n, k], b_scale, dtype) -> a b^T in dtype   (a, b in fp8; b_scale
        [n, k/128] or [n/128, k/128])
    nf4_dequantize(weight[o, 33 n] uint8, groups, mean[1], levels[16], codes[256], matrix[o, c], *, first=0, across,
        skip=0) -> matrix                             (written; bit for bit what torch computes)
    adamw_step(params, grads, exp_avg, exp_avg_sq, *, lr, beta1, beta2, eps, weight_decay, step, grad_scale=1.0,
        found_inf=None, copies=None, table=None) in place   (copies: 16-bit parameters rounded from fp32 params;
         grad_scale and found_inf may be scalars on the device; table: adamw_table(params, grads, ...), kept)
    l2norm(tensors) -> norm, a scalar in at least fp32 ; squared=True: its square

Each ``<op>_reference`` is the definition in torch.
"""

import sys

from triton.runtime.jit import JITFunction

from hetero_kernels.adamw import adamw_reference, adamw_step, adamw_table
from hetero_kernels.add_rms_norm import add_rms_norm_bwd, add_rms_norm_fwd, add_rms_norm_reference
from hetero_kernels.attention import AttentionDropout, attention_bwd, attention_fwd, attention_reference
from hetero_kernels.attention_mask import KeyIntervals, document_bounds, varlen_bounds
from hetero_kernels.attention_rows import (
    attention_delta,
    attention_delta_reference,
    attention_merge,
    attention_merge_reference,
)
from hetero_kernels.cross_entropy import cross_entropy_bwd, cross_entropy_fwd, cross_entropy_reference
from hetero_kernels.dropout import dropout, dropout_reference
from hetero_kernels.gated_delta import document_numbers, gated_delta_bwd, gated_delta_fwd, gated_delta_reference
from hetero_kernels.gelu import gelu_bwd, gelu_fwd, gelu_reference
from hetero_kernels.gemm_fp8 import (
    gemm_fp8_blocks,
    gemm_fp8_blocks_reference,
    quantise_fp8,
    quantise_fp8_blocks,
    quantise_fp8_blocks_reference,
    quantise_fp8_reference,
)
from hetero_kernels.grouped_gemm import grouped_gemm_dw, grouped_gemm_dx, grouped_gemm_fwd, grouped_gemm_reference
from hetero_kernels.l2norm import l2norm, l2norm_reference
from hetero_kernels.layer_norm import layer_norm_bwd, layer_norm_fwd, layer_norm_reference
from hetero_kernels.limits import INTERPRETED, INTERPRETER, Limits, limits_of
from hetero_kernels.linear_cross_entropy import (
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
    linear_cross_entropy_fwd_bwd,
    linear_cross_entropy_reference,
    linear_vocab_stats,
)
from hetero_kernels.multi_tensor import TensorTable, tensor_table
from hetero_kernels.nf4 import nf4_dequantize, nf4_dequantize_reference
from hetero_kernels.rms_norm import rms_norm_bwd, rms_norm_fwd, rms_norm_reference
from hetero_kernels.rope import rope_bwd, rope_fwd, rope_reference
from hetero_kernels.softmax import softmax_bwd, softmax_fwd, softmax_reference
from hetero_kernels.state_space_rule import state_space_bwd, state_space_fwd, state_space_reference
from hetero_kernels.swiglu import swiglu_bwd, swiglu_fwd, swiglu_reference
from hetero_kernels.vocab_parallel_cross_entropy import (
    merge_stats,
    vocab_stats,
    vocab_stats_bwd,
    vocab_stats_reference,
)


def _make_keys() -> None:
    """Make Triton's keys of all functions of this package, in one order.

    Triton hashes a kernel with the constants of the functions that it calls, but only of those that had their own key
    before (``JITFunction.cache_key`` of 3.6 and 3.7). So a kernel would have another key in another process, which
    launches others before it, and be compiled again though it lies in the cache."""
    for name in sorted(name for name in sys.modules if name.startswith(f"{__name__}.")):
        for value in list(vars(sys.modules[name]).values()):
            if isinstance(value, JITFunction):
                value.cache_key  # noqa: B018  # a property that keeps what it makes


_make_keys()

__all__ = [
    "AttentionDropout",
    "INTERPRETED",
    "INTERPRETER",
    "KeyIntervals",
    "Limits",
    "TensorTable",
    "adamw_reference",
    "adamw_step",
    "adamw_table",
    "add_rms_norm_bwd",
    "add_rms_norm_fwd",
    "add_rms_norm_reference",
    "attention_bwd",
    "attention_delta",
    "attention_delta_reference",
    "attention_fwd",
    "attention_merge",
    "attention_merge_reference",
    "attention_reference",
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "cross_entropy_reference",
    "document_bounds",
    "document_numbers",
    "dropout",
    "dropout_reference",
    "gated_delta_bwd",
    "gated_delta_fwd",
    "gated_delta_reference",
    "gelu_bwd",
    "gelu_fwd",
    "gelu_reference",
    "gemm_fp8_blocks",
    "gemm_fp8_blocks_reference",
    "grouped_gemm_dw",
    "grouped_gemm_dx",
    "grouped_gemm_fwd",
    "grouped_gemm_reference",
    "l2norm",
    "l2norm_reference",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "layer_norm_reference",
    "limits_of",
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "linear_cross_entropy_fwd_bwd",
    "linear_cross_entropy_reference",
    "linear_vocab_stats",
    "merge_stats",
    "nf4_dequantize",
    "nf4_dequantize_reference",
    "quantise_fp8",
    "quantise_fp8_blocks",
    "quantise_fp8_blocks_reference",
    "quantise_fp8_reference",
    "rms_norm_bwd",
    "rms_norm_fwd",
    "rms_norm_reference",
    "rope_bwd",
    "rope_fwd",
    "rope_reference",
    "softmax_bwd",
    "softmax_fwd",
    "softmax_reference",
    "state_space_bwd",
    "state_space_fwd",
    "state_space_reference",
    "swiglu_bwd",
    "swiglu_fwd",
    "swiglu_reference",
    "tensor_table",
    "varlen_bounds",
    "vocab_stats",
    "vocab_stats_bwd",
    "vocab_stats_reference",
]
