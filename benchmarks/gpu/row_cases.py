"""Cases of the memory-bound operators: norms, activations, rope, softmax."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from measure import Case, Side, autograd_side, relative
from torch.nn import functional as F

import hetero_kernels as hk

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
LIGER = importlib.util.find_spec("liger_kernel") is not None
Function = Callable[..., Any]


def randn(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=FP32).to(dtype)


def liger(name: str) -> Function:
    from liger_kernel.transformers import functional

    return getattr(functional, name)  # type: ignore[no-any-return]


def rivals(
    eager: Function, inputs: list[torch.Tensor], grads: tuple[torch.Tensor, ...], **more: Function
) -> dict[str, Callable[[], Side]]:
    """torch eager, torch.compile and what else there is."""

    def make(function: Function) -> Callable[[], Side]:
        return lambda: autograd_side(function, inputs, grads)

    def compiled() -> Side:
        torch.compiler.reset()  # else the shapes of earlier cases make it compile for any shape, then give up
        return autograd_side(torch.compile(eager, dynamic=False), inputs, grads)

    sides = {"torch eager": make(eager), "torch.compile": compiled}
    return sides | {name.replace("_", " "): make(function) for name, function in more.items()}


def exact_gradients(
    reference: Function, inputs: list[torch.Tensor], grads: tuple[torch.Tensor, ...], shared: int = 0,
    rows: int | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """[first output, gradient of each floating-point input] in fp64.

    Done by ``rows`` of the first axis at a time (default: of 64 M elements), so that fp64 fits beside the rest. The
    last ``shared`` inputs are weights, whose gradients are summed over the rows.
    """
    own = len(inputs) - shared
    weights = [x.detach().to(FP64).requires_grad_() for x in inputs[own:]]
    rows = rows or max(1, (1 << 26) // inputs[0][0].numel())
    parts, sums = [], [torch.zeros_like(w) for w in weights]
    for group in zip(*(x.detach().split(rows) for x in (*inputs[:own], *grads)), strict=True):
        leaves = [x.to(FP64).requires_grad_() if x.is_floating_point() else x for x in group[:own]]
        result = reference(*leaves, *weights)
        results = result if isinstance(result, tuple) else (result,)
        wanted, seeds = [x for x in leaves if x.requires_grad], [x.to(FP64) for x in group[own:]]
        found = torch.autograd.grad(results[: len(seeds)], [*wanted, *weights], seeds)
        parts.append([results[0].detach(), *found[: len(wanted)]])
        sums = [total + part for total, part in zip(sums, found[len(wanted) :], strict=True)]
    return [*(torch.cat(column) for column in zip(*parts, strict=True)), *sums]


def checked(
    names: str, caps: list[float], got: Callable[[], list[torch.Tensor]], exact: Callable[[], list[torch.Tensor]]
) -> Callable[[], list[tuple[str, float, float]]]:
    def check() -> list[tuple[str, float, float]]:
        return [
            (name, relative(g, e), cap) for name, g, e, cap in zip(names.split(), got(), exact(), caps, strict=True)
        ]

    return check


def rms_norm(device: torch.device, rows: int, width: int) -> Case:
    x, dy, w = randn(device, rows, width), randn(device, rows, width), randn(device, width)

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return hk.rms_norm_reference(x, w, 1e-5)

    def got() -> list[torch.Tensor]:
        y, rstd = hk.rms_norm_fwd(x, w, 1e-5)
        dx, dw = hk.rms_norm_bwd(dy, x, w, rstd)
        assert dw is not None
        return [y, dx, dw]

    more: dict[str, Function] = {"F.rms_norm": lambda x, w: F.rms_norm(x, (width,), w, 1e-5)}
    if LIGER:
        more["Liger"] = lambda x, w: liger("liger_rms_norm")(x, w, 1e-5)
    ours = Side(lambda: hk.rms_norm_fwd(x, w, 1e-5), lambda saved: hk.rms_norm_bwd(dy, x, w, saved[1]))
    return Case(
        "rms_norm", f"{rows}x{width}", {"ours": lambda: ours, **rivals(reference, [x, w], (dy,), **more)},
        2 * x.nbytes, 3 * x.nbytes,
        check=checked("y dx dw", [5e-3] * 3, got, lambda: exact_gradients(reference, [x, w], (dy,), 1)),
    )  # fmt: skip


def layer_norm(device: torch.device, rows: int, width: int) -> Case:
    x, dy, w, b = (randn(device, *shape) for shape in ((rows, width), (rows, width), (width,), (width,)))

    def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (width,), w, b, 1e-5)

    def got() -> list[torch.Tensor]:
        y, mean, rstd = hk.layer_norm_fwd(x, w, b, 1e-5)
        dx, dw, db = hk.layer_norm_bwd(dy, x, w, mean, rstd)
        assert dw is not None and db is not None
        return [y, dx, dw, db]

    more = {"Liger": lambda x, w, b: liger("liger_layer_norm")(x, w, b, 1e-5)} if LIGER else {}
    ours = Side(lambda: hk.layer_norm_fwd(x, w, b, 1e-5), lambda saved: hk.layer_norm_bwd(dy, x, w, *saved[1:]))
    return Case(
        "layer_norm", f"{rows}x{width}", {"ours": lambda: ours, **rivals(reference, [x, w, b], (dy,), **more)},
        2 * x.nbytes, 3 * x.nbytes,
        check=checked("y dx dw db", [5e-3] * 4, got, lambda: exact_gradients(reference, [x, w, b], (dy,), 2)),
    )  # fmt: skip


def add_rms_norm(device: torch.device, rows: int, width: int) -> Case:
    x, r, dy, ds = (randn(device, rows, width) for _ in range(4))
    w = randn(device, width)

    def reference(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + r
        return F.rms_norm(total, (width,), w, 1e-5), total

    def got() -> list[torch.Tensor]:
        y, total, rstd = hk.add_rms_norm_fwd(x, r, w, 1e-5)
        dx, dw = hk.add_rms_norm_bwd(dy, ds, total, w, rstd)
        assert dw is not None
        return [y, dx, dw]

    def exact() -> list[torch.Tensor]:
        y, dx, dw = exact_gradients(lambda s, w: hk.rms_norm_reference(s, w, 1e-5), [x + r, w], (dy,), 1)
        return [y, dx + ds.double(), dw]

    more = {"Liger": lambda x, r, w: liger("liger_fused_add_rms_norm")(x, r, w, 1e-5)} if LIGER else {}
    ours = Side(
        lambda: hk.add_rms_norm_fwd(x, r, w, 1e-5),
        lambda saved: hk.add_rms_norm_bwd(dy, ds, saved[1], w, saved[2]),
    )
    sides = {"ours": lambda: ours, **rivals(reference, [x, r, w], (dy, ds), **more)}
    return Case("add_rms_norm", f"{rows}x{width}", sides, 4 * x.nbytes, 4 * x.nbytes,
                check=checked("y dx dw", [5e-3] * 3, got, exact))  # fmt: skip


def swiglu(device: torch.device, rows: int, width: int) -> Case:
    gate, up, dy = (randn(device, rows, width) for _ in range(3))
    more = {"Liger": lambda g, u: liger("liger_swiglu")(g, u)} if LIGER else {}
    ours = Side(lambda: hk.swiglu_fwd(gate, up), lambda _: hk.swiglu_bwd(dy, gate, up))
    sides = {"ours": lambda: ours, **rivals(lambda g, u: F.silu(g) * u, [gate, up], (dy,), **more)}
    return Case(
        "swiglu", f"{rows}x{width}", sides, 3 * gate.nbytes, 5 * gate.nbytes,
        check=checked(
            "y dgate dup", [6e-3] * 3, lambda: [hk.swiglu_fwd(gate, up), *hk.swiglu_bwd(dy, gate, up)],
            lambda: exact_gradients(hk.swiglu_reference, [gate, up], (dy,)),
        ),
    )  # fmt: skip


def gelu(device: torch.device, rows: int, width: int, approximate: bool) -> Case:
    x, dy = randn(device, rows, width), randn(device, rows, width)
    kind = "tanh" if approximate else "none"

    def reference(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate=kind)

    ours = Side(lambda: hk.gelu_fwd(x, approximate=approximate), lambda _: hk.gelu_bwd(dy, x, approximate=approximate))
    return Case(
        "gelu", f"{rows}x{width}, {kind}", {"ours": lambda: ours, **rivals(reference, [x], (dy,))},
        2 * x.nbytes, 3 * x.nbytes,
        check=checked(
            "y dx", [6e-3] * 2, lambda: [ours.forward(), ours.backward(None)],  # type: ignore[misc]
            lambda: exact_gradients(reference, [x], (dy,)),
        ),
    )  # fmt: skip


def softmax(device: torch.device, rows: int, width: int) -> Case:
    x, dy = randn(device, rows, width), randn(device, rows, width)

    def got() -> list[torch.Tensor]:
        y = hk.softmax_fwd(x)
        return [y, hk.softmax_bwd(dy, y)]

    more = {"Liger": lambda x: liger("liger_softmax")(x)} if LIGER else {}
    ours = Side(lambda: hk.softmax_fwd(x), lambda y: hk.softmax_bwd(dy, y))
    sides = {"ours": lambda: ours, **rivals(lambda x: x.softmax(-1), [x], (dy,), **more)}
    return Case(
        "softmax", f"{rows}x{width}", sides, 2 * x.nbytes, 3 * x.nbytes,
        check=checked(
            "y dx", [5e-3, 6e-3], got, lambda: exact_gradients(lambda x: x.softmax(-1), [x], (dy,))
        ),
    )  # fmt: skip


def rope(device: torch.device, tokens: int, heads: int, kv_heads: int, dim: int) -> Case:
    q, k = randn(device, 1, tokens, heads, dim), randn(device, 1, tokens, kv_heads, dim)
    frequency = 5e5 ** (-torch.arange(dim // 2, dtype=FP64) / (dim // 2))
    angle = torch.outer(torch.arange(tokens, dtype=FP64), frequency).to(device)
    cos, sin = angle.cos().float(), angle.sin().float()

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)

    def reference(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return turned(q), turned(k)

    def got() -> list[torch.Tensor]:
        parts = [*hk.rope_fwd(q, k, cos, sin), *hk.rope_bwd(q, k, cos, sin)]
        return [part for part in parts if part is not None]

    def exact() -> list[torch.Tensor]:
        tables = cos.double(), sin.double()
        return [
            hk.rope_reference(x.double(), *tables, inverse=inverse) for inverse in (False, True) for x in (q, k)
        ]  # fmt: skip

    size = q.nbytes + k.nbytes
    sides: dict[str, Callable[[], Side]] = {
        "ours": lambda: Side(lambda: hk.rope_fwd(q, k, cos, sin), lambda _: hk.rope_bwd(q, k, cos, sin)),
        "ours, in place": lambda: Side(lambda: hk.rope_fwd(q, k, cos, sin, inplace=True)),
        **rivals(reference, [q, k], (q, k)),
    }
    if LIGER:
        full = [torch.cat([t, t], -1)[None] for t in (cos, sin)]  # [1, tokens, dim]
        heads_first = [x.transpose(1, 2).contiguous() for x in (q, k)]
        sides["Liger"] = lambda: autograd_side(
            lambda q, k: liger("liger_rope")(q, k, *full), heads_first, tuple(heads_first)
        )
    return Case("rope", f"{tokens} tokens, {heads}+{kv_heads} heads of {dim}", sides, 2 * size, 2 * size,
                check=checked("q k dq dk", [6e-3] * 4, got, exact))  # fmt: skip
