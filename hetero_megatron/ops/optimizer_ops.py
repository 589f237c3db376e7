"""AdamW over many tensors at once, and the norm of many tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from hetero_megatron.ops.spec import ATEN, Bounds, Case, Kernel, OpSpec, normal, reference_forward

Many = Sequence[torch.Tensor]


def adamw_definition(
    params: Many, grads: Many, first: Many, second: Many, copies: Many, step: int, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, grad_scale: float,
) -> tuple[list[torch.Tensor], ...]:  # fmt: skip
    """One step of AdamW (Loshchilov and Hutter, 2019): new (params, first, second, copies).

    All tensors in at least fp32 and, per position, of one shape; ``step`` counts from 1; gradients count times
    ``grad_scale``. ``copies`` receive the new params in their own dtype; there are as many as params, or none.
    """
    new = ([], [], [])  # type: tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]
    for p, g, m, v in zip(params, grads, first, second, strict=True):
        g = grad_scale * g
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        denominator = (v / (1 - beta2**step)).sqrt() + eps
        new[0].append(p * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / denominator)
        new[1].append(m)
        new[2].append(v)
    return *new, [p.to(c.dtype) for p, c in zip(new[0], copies)]


def adamw_reference(
    params: Many, grads: Many, first: Many, second: Many, copies: Many, *options: float
) -> tuple[()]:
    """In place, by the definition."""
    with torch.no_grad():
        updated = adamw_definition(params, grads, first, second, copies, *options)  # type: ignore[arg-type]
        for old, new in zip((params, first, second, copies), updated, strict=True):
            for a, b in zip(old, new, strict=True):
                a.copy_(b)
    return ()


def adamw_aten(
    params: Many, grads: Many, first: Many, second: Many, copies: Many, step: int, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, grad_scale: float,
) -> tuple[()]:  # fmt: skip
    """torch's fused step: one pass over all tensors, one before it where the gradients are scaled (in place: by itself
    torch's would divide, and write them too), one after it for copies."""
    if len(params):
        if grad_scale != 1.0:
            torch._foreach_mul_(list(grads), grad_scale)
        count = {p.device: torch.full((), float(step), device=p.device) for p in params}
        steps = [count[p.device] for p in params]
        torch._fused_adamw_(
            list(params), list(grads), list(first), list(second), [], steps, lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
    if len(copies):
        torch._foreach_copy_(list(copies), list(params))
    return ()


def l2norm_definition(tensors: Many) -> tuple[torch.Tensor]:
    """Square root of the sum of squares of all elements, [] in fp64 (other providers: in at least fp32)."""
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device if len(tensors) else "cpu")
    for x in tensors:
        total = total + x.double().square().sum()
    return (total.sqrt(),)


def l2norm_aten(tensors: Many) -> tuple[torch.Tensor]:
    """Norms per tensor by torch, combined in fp64 on the host, and in their own dtype on devices: not all have fp64."""
    full = [x for x in tensors if x.numel()]
    if not full:
        return (torch.zeros(()),)
    norms = torch._foreach_norm(full)
    dtypes = [torch.float64] if norms[0].device.type == "cpu" else [n.dtype for n in norms]
    wide_dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    return (torch.linalg.vector_norm(torch.stack([n.to(wide_dtype) for n in norms])),)


_SHAPES = ((5, 7), (1,), (33,), (3, 0), (2, 3, 4), (1025,))


def _tensors(seed: int, positive: bool = False) -> list[torch.Tensor]:
    values = [normal(*shape, seed=seed) for shape in _SHAPES]
    return [x.square() for x in values] if positive else values


def _adamw_cases() -> Iterable[Case]:
    for step, decay, scale, rates in (
        (1, 0.0, 1.0, (1e-2, 0.9, 0.95, 1e-8)), (1, 0.1, 0.3, (0.3, 0.7, 0.999, 1e-8)),
        (1000, 0.1, 1.0, (1e-2, 0.95, 0.5, 0.1)), (7, 2.0, 1.0, (1e-2, 0.9, 0.95, 1e-8)),
        (1000, 0.0, 1e-3, (0.07, 0.0, 0.98, 1e-5)),
    ):  # fmt: skip
        state = (_tensors(3), _tensors(4, True)) if step > 1 else ([torch.zeros_like(x) for x in _tensors(3)],) * 2
        state = tuple([x.clone() for x in part] for part in state)  # type: ignore[assignment]
        options = (step, *rates, decay, scale)
        copies = _tensors(5) if step > 1 else []
        name = f"step {step}, decay {decay}, gradients times {scale}{', copies' * bool(copies)}"
        yield Case(name, (_tensors(1), _tensors(2), *state, copies, *options))
    yield Case("no tensors", ([], [], [], [], [], 1, 1e-2, 0.9, 0.95, 1e-8, 0.0, 0.5))


def _norm_cases() -> Iterable[Case]:
    yield Case("plain", (_tensors(1),))
    yield Case("no tensors", ([],))
    yield Case("empty tensors", ([normal(0, 3, seed=1)],))
    yield Case("strided", ([normal(8, 6, seed=1).t(), normal(9, 9, seed=2)[1:, 2:]],))


def _numel(tensors: Many) -> int:
    return sum(x.numel() for x in tensors)


def _large(seed: int) -> list[torch.Tensor]:
    return [normal(512, 512, seed=seed) for _ in range(4)]


_OPTIONS = (10, 1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5)

SPECS = (
    OpSpec(
        name="adamw", version=3, tensors=("params", "grads", "first", "second", "copies"),
        lists=("params", "grads", "first", "second", "copies"),
        options=("step", "lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale"), results=(), schema=None,
        in_place=("params", "first", "second", "copies"), definition=adamw_definition, forward=adamw_reference,
        backward=None, fake=lambda *args: (), flops=lambda params, *rest: 12 * _numel(params), cases=_adamw_cases,
        wide=("params", "grads", "first", "second"), bounds=Bounds((1e-6, 0), (1e-6, 0), (1e-6, 0)),
        speed=lambda: Case("1M elements", (*map(_large, (1, 2, 3)), [x.square() for x in _large(4)], [], *_OPTIONS)),
    ),
    OpSpec(
        name="l2norm", tensors=("tensors",), lists=("tensors",), options=(), results=("norm",), schema=None,
        definition=l2norm_definition, forward=reference_forward(l2norm_definition), backward=None,
        fake=lambda tensors: (torch.empty((), dtype=torch.float64),), flops=lambda tensors: 2 * _numel(tensors),
        cases=_norm_cases, bounds=Bounds((1e-6, 0), (1e-3, 0), (1e-2, 0)), wide=("tensors",),
        speed=lambda: Case("1M elements", (_large(1),)),
    ),
)  # fmt: skip
KERNELS = (
    Kernel("adamw", "aten", ATEN, adamw_aten, None, overwrites=("grads",), version=3),
    Kernel("l2norm", "aten", ATEN, l2norm_aten, None),
)
