"""Cases of the losses, attention and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from measure import Case, Side, autograd_side
from row_cases import BF16, FP32, FP64, LIGER, Function, checked, exact_gradients, liger, randn, rivals
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hetero_kernels as hk


def cross_entropy(device: torch.device, tokens: int, vocabulary: int) -> Case:
    logits = randn(device, tokens, vocabulary)
    target = torch.randint(0, vocabulary, (tokens,), device=device)
    dloss = torch.full((tokens,), 1 / tokens, device=device)

    def reference(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.float(), target, reduction="none")

    def got() -> list[torch.Tensor]:
        loss, lse = hk.cross_entropy_fwd(logits, target)
        half = vocabulary // 3  # two shards of unlike size
        shards = [(logits[:, :half], 0), (logits[:, half:], half)]
        merged, total = hk.merge_stats([hk.vocab_stats(part, target, start) for part, start in shards])
        gradients = [hk.vocab_stats_bwd(dloss, part, target, start, total) for part, start in shards]
        return [loss, hk.cross_entropy_bwd(dloss, logits, target, lse), merged, torch.cat(gradients, -1)]

    def exact() -> list[torch.Tensor]:
        return exact_gradients(hk.cross_entropy_reference, [logits, target], (dloss,)) * 2

    def shard() -> Side:
        """What a vocabulary-parallel rank does, without the exchange."""
        return Side(
            lambda: hk.vocab_stats(logits, target, 0),
            lambda stats: hk.vocab_stats_bwd(dloss, logits, target, 0, hk.merge_stats([stats])[1]),
        )

    ours = Side(
        lambda: hk.cross_entropy_fwd(logits, target),
        lambda saved: hk.cross_entropy_bwd(dloss, logits, target, saved[1]),
    )
    more: dict[str, Function] = {"torch in bf16": lambda x: F.cross_entropy(x, target, reduction="none")}
    sides: dict[str, Callable[[], Side]] = {
        "ours": lambda: ours,
        "ours, one shard": shard,
        **rivals(reference, [logits], (dloss,), **more),
    }
    if LIGER:  # its gradient needs a mean or a sum
        sides["Liger"] = lambda: autograd_side(lambda x: liger("liger_cross_entropy")(x, target), [logits], ())
    return Case("cross_entropy", f"{tokens}x{vocabulary}", sides, logits.nbytes, 2 * logits.nbytes,
                check=checked("loss dlogits shards' shards'_dlogits", [1e-5, 5e-3] * 2, got, exact))  # fmt: skip


def linear_cross_entropy(device: torch.device, tokens: int, hidden: int, vocabulary: int) -> Case:
    x = randn(device, tokens, hidden)
    w = (randn(device, vocabulary, hidden, dtype=FP32) / hidden**0.5).to(BF16)
    target = torch.randint(0, vocabulary, (tokens,), device=device)
    dloss = torch.full((tokens,), 1 / tokens, device=device)
    main_grad = torch.zeros(vocabulary, hidden, device=device)  # as a trainer keeps it

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((x @ w.t()).float(), target, reduction="none")

    few = slice(0, min(tokens, 512))  # fp64 of all tokens would not fit

    def got() -> list[torch.Tensor]:
        once, _, *together = hk.linear_cross_entropy_fwd_bwd(x[few], w, target[few], dloss[few], chunk=128)
        loss, lse = hk.linear_cross_entropy_fwd(x[few], w, target[few])
        return [once, *together, loss, *hk.linear_cross_entropy_bwd(dloss[few], x[few], w, target[few], lse)]

    def exact() -> list[torch.Tensor]:
        return 2 * exact_gradients(
            lambda x, w: hk.linear_cross_entropy_reference(x, w, target[few]), [x[few], w], (dloss[few],), 1
        )

    def backward(saved: Any) -> Any:
        """As the operator of a kernel plan does it: dW summed in fp32, then in the weight's dtype."""
        dx, dw = hk.linear_cross_entropy_bwd(dloss, x, w, target, saved[1])
        return dx, dw.to(w.dtype)

    at_once = Side(lambda: hk.linear_cross_entropy_fwd_bwd(x, w, target, dloss, grad_weight=main_grad))
    ours = Side(lambda: hk.linear_cross_entropy_fwd(x, w, target), backward)
    more: dict[str, Function] = {"torch in bf16": lambda x, w: F.cross_entropy(x @ w.t(), target, reduction="none")}
    sides: dict[str, Callable[[], Side]] = {
        "ours": lambda: ours,
        "ours, at once": lambda: at_once,
        **rivals(reference, [x, w], (dloss,), **more),
    }
    if hasattr(F, "linear_cross_entropy"):
        native: Function = F.linear_cross_entropy
        sides["F.linear_cross_entropy"] = lambda: autograd_side(lambda x, w: native(x, w, target), [x, w], ())
    if LIGER:
        sides["Liger"] = lambda: autograd_side(
            lambda x, w: liger("liger_fused_linear_cross_entropy")(x, w, target), [x, w], ()
        )
    flops = 2.0 * tokens * hidden * vocabulary
    return Case("linear_cross_entropy", f"{tokens}x{hidden}x{vocabulary}", sides, forward_flops=flops,
                backward_flops=2 * flops, check=checked(
                    "at_once dx dw loss dx' dw'", [1e-4, 6e-3, 6e-3] * 2, got, exact))  # fmt: skip


def attention(
    device: torch.device, batch: int, length: int, heads: int, kv_heads: int, dim: int, causal: bool, check: bool,
    window: int | None = None, documents: tuple[int, ...] = (),
) -> Case:  # fmt: skip
    """``documents``: where they start, in every row; torch's attention takes neither them nor a window."""
    q, dout = (randn(device, batch, length, heads, dim) for _ in range(2))
    k, v = (randn(device, batch, length, kv_heads, dim) for _ in range(2))
    bounds = hk.document_bounds([documents] * batch, length, device) if documents else None
    mask: dict[str, Any] = {"causal": causal, "window": window, "bounds": bounds}

    def sdpa(backend: SDPBackend) -> Callable[[], Side]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
            return out.transpose(1, 2)

        return lambda: autograd_side(run, [q, k, v], (dout,))

    def got() -> list[torch.Tensor]:
        out, lse = hk.attention_fwd(q, k, v, **mask)
        return [out, *hk.attention_bwd(dout, q, k, v, out, lse, **mask)]

    def exact() -> list[torch.Tensor]:
        def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return hk.attention_reference(q, k, v, **(mask | {"bounds": None if bounds is None else bounds[:1]}))

        return exact_gradients(reference, [q, k, v], (dout,), rows=1)  # 1 GiB of fp64 scores per batch row, many times

    ours = Side(
        lambda: hk.attention_fwd(q, k, v, **mask),
        lambda saved: hk.attention_bwd(dout, q, k, v, *saved, **mask),
    )
    edges = [*(documents or (0,)), length]
    seen = sum(_pairs(end - start, window) for start, end in pairwise(edges)) if causal else length**2
    flops = 4.0 * batch * heads * seen * dim
    sides: dict[str, Callable[[], Side]] = {"ours": lambda: ours}
    if window is None and not documents:
        sides["SDPA cuDNN"] = sdpa(SDPBackend.CUDNN_ATTENTION)
        sides["SDPA FlashAttention-2"] = sdpa(SDPBackend.FLASH_ATTENTION)
    kind = "documents" if documents else "window" if window else "causal" if causal else "full"
    return Case(
        f"attention {kind} {dim}", f"{batch}x{length}, {heads}/{kv_heads} heads", sides,
        forward_flops=flops, backward_flops=2.5 * flops,
        check=checked("out dq dk dv", [8e-3, 1.2e-2, 1.2e-2, 1.2e-2], got, exact) if check else None,
    )  # fmt: skip


def _pairs(length: int, window: int | None) -> float:
    """Pairs of query and key that a causal document of ``length`` tokens has: half of a square and of the window."""
    full = min(length, window or length)
    return full**2 / 2 + (length - full) * full


def attention_merge(device: torch.device, length: int, heads: int, dim: int) -> Case:
    a, b = (randn(device, 1, length, heads, dim) for _ in range(2))
    lse_a, lse_b = (randn(device, 1, heads, length, dtype=FP32) for _ in range(2))

    def exact() -> list[torch.Tensor]:
        return list(hk.attention_merge_reference(*(x.to(FP64) for x in (a, lse_a, b, lse_b))))

    ours = Side(lambda: hk.attention_merge(a, lse_a, b, lse_b))
    eager = Side(lambda: hk.attention_merge_reference(a, lse_a, b, lse_b))
    return Case("attention_merge", f"{length}, {heads} heads of {dim}",
                {"ours": lambda: ours, "torch eager": lambda: eager}, 3 * (a.nbytes + lse_a.nbytes),
                check=checked("out lse", [6e-3, 1e-6], lambda: list(ours.forward()), exact))  # fmt: skip


def attention_delta(device: torch.device, length: int, heads: int, dim: int) -> Case:
    a, b = (randn(device, 1, length, heads, dim) for _ in range(2))
    ours = Side(lambda: hk.attention_delta(a, b))
    eager = Side(lambda: hk.attention_delta_reference(a, b))
    return Case("attention_delta", f"{length}, {heads} heads of {dim}",
                {"ours": lambda: ours, "torch eager": lambda: eager}, 2 * a.nbytes + length * heads * 4,
                check=checked("delta", [1e-5], lambda: [ours.forward()],
                              lambda: [hk.attention_delta_reference(a.double(), b.double())]))  # fmt: skip


def adamw(device: torch.device, shapes: list[tuple[int, ...]]) -> Case:
    grads = [randn(device, *shape) for shape in shapes]
    masters, first, second = ([torch.zeros(shape, device=device) for shape in shapes] for _ in range(3))
    copies = [torch.empty_like(grad) for grad in grads]
    options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "eps": 1e-8}
    count = sum(grad.numel() for grad in grads)

    def ours(table: Any) -> Side:
        return Side(
            lambda: hk.adamw_step(
                masters, grads, first, second, beta1=0.9, beta2=0.95, step=3, copies=copies, table=table, **options
            )
        )

    def fused() -> Side:
        """torch's fused AdamW on fp32 gradients, and the copy to bf16 that it lacks."""
        params = [master.clone().requires_grad_() for master in masters]
        for p, g in zip(params, grads):
            p.grad = g.float()
        optimizer = torch.optim.AdamW(params, betas=(0.9, 0.95), fused=True, **options)

        def run() -> None:
            optimizer.step()
            torch._foreach_copy_(copies, [p.detach() for p in params])

        return Side(run)

    def step(function: Callable[..., None], dtype: torch.dtype) -> list[torch.Tensor]:
        grad = grads[0].to(dtype) if dtype == FP64 else grads[0]
        state = [
            [masters[0].to(dtype, copy=True)],
            [grad],
            *([torch.zeros_like(masters[0], dtype=dtype)] for _ in "mv"),
        ]
        function(*state, beta1=0.9, beta2=0.95, step=1, **options)
        return [state[0][0], state[2][0], state[3][0]]

    sides = {
        "ours": lambda: ours(None),
        "ours, table kept": lambda: ours(hk.adamw_table(masters, grads, first, second, copies)),
        "torch fused and copy": fused,
    }
    return Case("adamw", f"{count / 1e6:.0f} M", sides, 28.0 * count,
                check=checked("param average square", [1e-6] * 3, lambda: step(hk.adamw_step, FP32),
                              lambda: step(hk.adamw_reference, FP64)))  # fmt: skip


def l2norm(device: torch.device, shapes: list[tuple[int, ...]]) -> Case:
    grads = [randn(device, *shape) for shape in shapes]
    ours = Side(lambda: hk.l2norm(grads))
    foreach = Side(lambda: torch.stack(torch._foreach_norm(grads)).norm())
    count = sum(grad.numel() for grad in grads)

    def exact() -> list[torch.Tensor]:
        return [torch.cat([g.double().flatten() for g in grads]).norm()]

    sides = {"ours": lambda: ours, "torch foreach": lambda: foreach}
    return Case("l2norm", f"{count / 1e6:.0f} M", sides, 2.0 * count,
                check=checked("norm", [1e-6], lambda: [ours.forward()], exact))  # fmt: skip
