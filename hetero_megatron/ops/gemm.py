"""Matrix product of activations and weights: the operator behind every linear layer of the model.

Its weight gradient is added up in an fp32 buffer where somebody takes it (``parallel/grad_sync/gradients.py``). It can
be put off, too: where a pipeline schedule splits backward, :class:`WeightGradients` defers in ``B_INPUT`` what ``W``
computes.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from hetero_megatron.ops.bind import by_mode
from hetero_megatron.ops.spec import (
    ATEN,
    Bounds,
    Case,
    Kernel,
    OpSpec,
    autograd_backward,
    normal,
    reference_forward,
    wide,
)


def definition(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    """x W^T + b in at least fp32. x: [..., k]; weight: [n, k]; bias: [n] or None -> [..., n]."""
    w = wide(x.dtype)
    return (F.linear(x.to(w), weight.to(w), None if bias is None else bias.to(w)).to(x.dtype),)


def linear_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    return (F.linear(x, weight, bias),)


def input_gradient(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., n], [n, k] -> [..., k]."""
    return dy @ weight


@functools.cache
def _adds_to_wider(device_type: str) -> bool:
    """Whether aten adds a product of 16-bit matrices to an fp32 sum on such devices."""
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::addmm.dtype_out", key)


def weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0
) -> torch.Tensor:
    """dy^T x, [n, k]; ``into``: fp32 (or wider) sum that it is added to in that precision, after times ``beta``: 1, or
    0 where nothing is there yet."""
    dy, x = dy.flatten(0, -2), x.flatten(0, -2)
    return dy.t() @ x if into is None else add_product(dy.t(), x, into, beta)


def add_product(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor, beta: float) -> torch.Tensor:
    """``into`` = beta into + a b, accumulated in the precision of ``into``, which may be wider than that of a and b."""
    if into.dtype != b.dtype and _adds_to_wider(into.device.type):
        return torch.ops.aten.addmm.dtype_out(into, a, b, into.dtype, beta=beta, out=into)  # type: ignore[no-any-return]
    if into.dtype != b.dtype and into.device.type != "cpu":  # accelerators multiply 16 bits many times as fast
        product_added = a @ b  # rounded once more than where the product is added in the sum's precision
        return into.add_(product_added) if beta else into.copy_(product_added)
    return into.addmm_(a.to(into.dtype), b.to(into.dtype), beta=beta)


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a b in ``dtype``, which may be wider than that of a and b."""
    return add_product(a, b, a.new_empty(a.shape[0], b.shape[1], dtype=dtype), 0.0)


def linear_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    return (
        input_gradient(dy, weight),
        weight_gradient(dy, x),
        None if bias is None else dy.flatten(0, -2).sum(0),
    )


WeightKernel = Callable[..., torch.Tensor]  # (dy, x, into, beta): the part ``weight`` of a kernel
Taker = Callable[[torch.Tensor, torch.Tensor, WeightKernel], object]  # (dy, x, kernel)


class Product(NamedTuple):
    """A weight gradient that is to be computed: ``kernel(dy, x)``, of the rows of all ``weights`` one after the other.
    """

    weights: tuple[torch.Tensor, ...]
    dy: torch.Tensor
    x: torch.Tensor
    kernel: WeightKernel


class WeightGradients:
    """Weight gradients that do not go through autograd.

    Everywhere ``weights`` are those of one product: one, or several whose rows are multiplied at once
    (``ops/gemm.py``).

    Attributes:
        deferring: backward of ``gemm`` leaves its operands here, until ``take`` or ``flush``.
    """

    def __init__(self) -> None:
        self._takers: dict[tuple[int, ...], Taker] = {}
        self.deferring = False
        self._waiting: deque[Product] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def assign(self, weights: Sequence[torch.Tensor], taker: Taker) -> None:
        """Have ``taker(dy, x, kernel)`` called instead of what autograd does with the product's gradient, where
        ``kernel(dy, x, into, beta)`` computes it. No hook of the weights runs. They must live on."""
        self._takers[tuple(map(id, weights))] = taker

    def taker(self, weights: Sequence[torch.Tensor]) -> Taker | None:
        return self._takers.get(tuple(map(id, weights)))

    def gradient(
        self, weights: tuple[torch.Tensor, ...], dy: torch.Tensor, x: torch.Tensor, kernel: WeightKernel
    ) -> torch.Tensor | None:
        """What autograd gets: None where the product is put off, or given to its taker."""
        if self.deferring and all(weight.is_leaf for weight in weights):
            # What autograd saved knows the graph that made it, and so would keep the stage's input, too.
            self._waiting.append(Product(weights, dy.detach(), x.detach(), kernel))
        elif (taker := self.taker(weights)) is not None:
            taker(dy, x, kernel)
        else:
            return kernel(dy, x)
        return None

    def take(self) -> deque[Product]:
        """What waits, to be flushed later."""
        waiting, self._waiting = self._waiting, deque()
        return waiting

    @torch.no_grad()
    def flush(self, waiting: deque[Product] | None = None) -> None:
        """Compute what waits (or what was taken), oldest first: for its taker, or into ``.grad`` with the weight's
        hooks, as autograd does. The operands of each go when it is done."""
        products = self.take() if waiting is None else waiting
        while products:
            weights, dy, x, kernel = products.popleft()
            if (taker := self.taker(weights)) is not None:
                taker(dy, x, kernel)
            else:
                torch.autograd.backward(weights, kernel(dy, x).split([len(weight) for weight in weights]))
            del dy, x


def bind_gemm(kernel: Kernel, gradients: WeightGradients, traced: bool = False) -> Callable[..., torch.Tensor]:
    """The differentiable product of one kernel plan; ``traced``: ``torch.compile`` looks inside, where no gradient can
    be put off or given away."""
    forward, for_input, for_weight = kernel.forward, kernel.parts["input"], kernel.parts["weight"]

    class Gemm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            if not traced:
                ctx.leaf = weight  # recomputation saves another tensor of the same values
            return forward(x, weight, bias)[0]  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
            x, weight = ctx.saved_tensors
            x_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad
            dx = for_input(dy, weight) if x_wanted else None
            dw = None
            if weight_wanted:
                dw = for_weight(dy, x) if traced else gradients.gradient((ctx.leaf,), dy, x, for_weight)  # type: ignore[arg-type]
            return dx, dw, dy.flatten(0, -2).sum(0) if bias_wanted else None

    return Gemm.apply if traced else by_mode(Gemm.apply, forward, 1)


def _flops(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    return 2 * x.numel() * weight.shape[0]


def _cases() -> Iterable[Case]:
    for name, lead, k, n in (
        ("plain", (4, 6), 32, 24), ("odd", (3, 5), 17, 13), ("one", (1, 1), 1, 1), ("no rows", (2, 0), 8, 4),
        ("no columns", (2, 3), 8, 0), ("long k", (2, 2), 1031, 5), ("many rows", (1, 65_537), 2, 3),
    ):  # fmt: skip
        yield Case(name, (normal(*lead, k, seed=1), normal(n, k, seed=2), normal(n, seed=3)))
    yield Case("no bias", (normal(4, 6, 8, seed=1), normal(5, 8, seed=2), None))
    yield Case("strided", (normal(6, 4, 8, seed=1).transpose(0, 1), normal(8, 5, seed=2).t(), None))


_reference_backward = autograd_backward(definition, lambda x, w, b: (x, w, b), 1, (0, 1, 2))

SPEC = OpSpec(
    name="gemm",
    tensors=("x", "weight", "bias"),
    options=(),
    results=("y",),
    parts=("input", "weight"),
    optional=("bias",),
    definition=definition,
    forward=reference_forward(definition),
    backward=_reference_backward,
    saves=("x", "weight", "bias"),
    gradients=("x", "weight", "bias"),
    fake=lambda x, weight, bias: (x.new_empty(*x.shape[:-1], weight.shape[0]),),
    flops=_flops,
    cases=_cases,
    speed=lambda: Case("1024x512x512", (normal(1, 1024, 512, seed=1), normal(512, 512, seed=2), None)),
    bounds=Bounds((2e-6, 1e-5),  # 1e-6 x sqrt(K / 1024), and K is 65,537 in one case
                   (1e-3, 1e-3), (5e-3, 5e-3)),
)


def _reference_input(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    w = wide(dy.dtype)
    return (dy.to(w) @ weight.to(w)).to(dy.dtype)


def _reference_weight(
    dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0
) -> torch.Tensor:
    w = wide(dy.dtype)
    return add_up(dy.flatten(0, -2).to(w).t() @ x.flatten(0, -2).to(w), x.dtype, into, beta)


def add_up(product: torch.Tensor, dtype: torch.dtype, into: torch.Tensor | None, beta: float) -> torch.Tensor:
    """A weight gradient as the part ``weight`` returns it: in ``dtype``, or added to ``into`` times ``beta``."""
    if into is None:
        return product.to(dtype)
    return into.add_(product) if beta else into.copy_(product)


REFERENCE_PARTS: dict[str, Callable[..., object]] = {"input": _reference_input, "weight": _reference_weight}
PARTS: dict[str, Callable[..., object]] = {"input": input_gradient, "weight": weight_gradient}
KERNELS = (Kernel("gemm", "aten", ATEN, linear_forward, linear_backward, parts=PARTS, traceable=True),)


Products = Callable[
    [torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor | None]], tuple[torch.Tensor, ...]
]  # (x, weights, biases) -> the product with each


def joint_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors [n_i, ...] that lie one after the other in one piece of memory as one [sum of n_i, ...], without a copy;
    None where they do not."""
    first = parts[0]
    end, storage = first.storage_offset(), first.untyped_storage()._cdata
    for part in parts:
        if part.storage_offset() != end or part.untyped_storage()._cdata != storage or not part.is_contiguous():
            return None
        end += part.numel()
    row_shape = first.shape[1:]
    strides = [row_shape[i:].numel() for i in range(len(row_shape) + 1)]
    return first.as_strided((sum(part.shape[0] for part in parts), *row_shape), strides)


def joint_columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors [..., n_i] side by side, [..., sum of n_i]: without a copy where they are neighbours in one contiguous
    tensor."""
    first = parts[0]
    end, storage, strides = first.storage_offset(), first.untyped_storage()._cdata, first.stride()
    for part in parts:
        if part.storage_offset() != end or part.untyped_storage()._cdata != storage or part.stride() != strides:
            return torch.cat(list(parts), -1)
        end += part.shape[-1]
    joined = first.as_strided((*first.shape[:-1], end - first.storage_offset()), strides)
    return joined if joined.is_contiguous() else torch.cat(list(parts), -1)


def separate(gemm: Callable[..., torch.Tensor]) -> Products:
    """A product with each weight."""

    def products(
        x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        return tuple(gemm(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    return products


def bind_joint_gemm(kernel: Kernel, gradients: WeightGradients, gemm: Callable[..., torch.Tensor]) -> Products:
    """The differentiable products by a kernel of ``gemm``, each by ``gemm`` where the weights (or biases) lie apart or
    only some of them are trained. Results are columns of one tensor."""
    forward, for_input, for_weight = kernel.forward, kernel.parts["input"], kernel.parts["weight"]

    class JointGemm(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, count: int,
            *parts: torch.Tensor,
        ) -> tuple[torch.Tensor, ...]:  # fmt: skip
            ctx.save_for_backward(x, weight)
            ctx.leaves = parts[:count]  # recomputation saves other tensors of the same values
            ctx.rows = [len(part) for part in ctx.leaves]
            return _apart(forward(x, weight, bias)[0], ctx.rows)

        @staticmethod
        def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
            x, weight = ctx.saved_tensors
            x_wanted, weights_wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
            dy, count = joint_columns(dys), len(ctx.rows)
            dx = for_input(dy, weight) if x_wanted else None
            dws: Sequence[torch.Tensor | None] = (None,) * count
            if weights_wanted[0]:
                dw = gradients.gradient(ctx.leaves, dy, x, for_weight)  # type: ignore[arg-type]
                dws = dws if dw is None else dw.split(ctx.rows)
            dbs: Sequence[torch.Tensor | None] = (None,) * (len(weights_wanted) - count)
            if any(weights_wanted[count:]):
                dbs = dy.flatten(0, -2).sum(0).split(ctx.rows)
            return dx, None, None, None, *dws, *dbs

    def joint(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, count: int, *parts: Any) -> Any:
        if torch.is_grad_enabled():
            return JointGemm.apply(x, weight, bias, count, *parts)
        return _apart(forward(x, weight, bias)[0], [part.shape[0] for part in parts[:count]])

    return _where_together(joint, gemm)


def watched_joint_gemm(gemm: Callable[..., torch.Tensor]) -> Products:
    """The same by calls of ``gemm``, which somebody watches: one call where the weights lie together."""

    def joint(
        x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None, count: int, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        weight = _Rows.apply(*parts[:count])
        y = gemm(x, weight, None if bias is None else _Rows.apply(*parts[count:]))
        return _Columns.apply(y, [len(part) for part in parts[:count]])  # type: ignore[no-any-return]

    return _where_together(joint, gemm)


def _where_together(joint: Callable[..., tuple[torch.Tensor, ...]], gemm: Callable[..., torch.Tensor]) -> Products:
    separate_products = separate(gemm)

    def products(
        x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        biases_there = [bias for bias in biases if bias is not None]
        with torch.no_grad():
            weight, bias = joint_rows(weights), joint_rows(biases_there) if biases_there else None
        is_uniform = len({part.requires_grad for part in weights}) == 1 and len(biases_there) in (0, len(weights))
        if len(weights) == 1 or weight is None or not is_uniform or (biases_there and bias is None):
            return separate_products(x, weights, biases)
        return joint(x, weight, bias, len(weights), *weights, *biases_there)

    return products


def _apart(y: torch.Tensor, columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Columns of y, to autograd no views of one tensor: an operator may overwrite some and leave the others."""
    return tuple(part.data for part in y.split(list(columns), -1))


class _Rows(torch.autograd.Function):
    """``joint_rows``, where they lie together."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.rows = [len(part) for part in parts]
        joined = joint_rows(parts)
        assert joined is not None
        return joined.data

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad.split(ctx.rows)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return _apart(y, columns)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return joint_columns(grads), None
