"""Cases of linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measure import Case, Side
from row_cases import FP32, checked, exact_gradients, randn
from torch.nn import functional as F

import hetero_kernels as hk
from hetero_megatron.ops.gated_delta_chunks import backward, forward

EPS = 1e-6


def gated_delta(
    device: torch.device, batch: int, length: int, key_heads: int, value_heads: int, dim: int, dim_v: int,
    documents: tuple[int, ...] = (),
) -> Case:  # fmt: skip
    """Beside the torch form, by chunks too, that serves where Triton does not. ``documents``: starts, in every row."""
    q, k = (randn(device, batch, length, key_heads, dim) for _ in range(2))
    v, dout = (randn(device, batch, length, value_heads, dim_v) for _ in range(2))
    g = -F.softplus(torch.randn(batch, length, value_heads, device=device))
    beta = randn(device, batch, length, value_heads).sigmoid()
    dlast = torch.zeros(batch, value_heads, dim, dim_v, device=device, dtype=FP32)  # as where nobody needs the state
    starts = [list(documents)] * batch if documents else None
    numbers = hk.document_numbers(starts, length, device) if starts else None
    few = slice(0, min(length, 256))  # token by token, in fp64

    def rule(n: Any = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {"documents": None if numbers is None else numbers[:, n], "eps": EPS}
        return hk.gated_delta_fwd(q[:, n], k[:, n], v[:, n], g[:, n], beta[:, n], **options)

    def gradients(n: Any = slice(None)) -> Any:
        options: dict[str, Any] = {"documents": None if numbers is None else numbers[:, n], "eps": EPS}
        return hk.gated_delta_bwd(dout[:, n], dlast, q[:, n], k[:, n], v[:, n], g[:, n], beta[:, n], **options)

    def got() -> list[torch.Tensor]:
        return [rule(few)[0], *gradients(few)[:5]]

    def exact() -> list[torch.Tensor]:
        seen = None if numbers is None else numbers[:1, few]
        return exact_gradients(
            lambda *x: hk.gated_delta_reference(*x, documents=seen, eps=EPS),
            [x[:, few] for x in (q, k, v, g, beta)], (dout[:, few], dlast), rows=1,
        )  # fmt: skip

    def torch_form() -> Side:
        arguments = (q, k, v, g, beta, None, starts, EPS)
        return Side(lambda: forward(*arguments), lambda _: backward(dout, dlast, *arguments))

    sides: dict[str, Callable[[], Side]] = {
        "ours": lambda: Side(rule, lambda _: gradients()), "torch chunks": torch_form,
    }  # fmt: skip
    flops = 6.0 * v.numel() * dim
    read = 2.0 * (q.numel() + k.numel() + v.numel())
    return Case(
        f"gated_delta {dim}x{dim_v}{', documents' * bool(documents)}",
        f"{batch}x{length}, {key_heads}/{value_heads} heads", sides, read + 2.0 * v.numel(), 2 * read + 4.0 * v.numel(),
        flops, 2 * flops, checked("out dq dk dv dg dbeta", [2e-2] * 6, got, exact),
    )  # fmt: skip
