"""Matrix product in 8-bit floats: operands are scaled to the range of fp8, rounded, multiplied, and scaled back.

Recipes, as Megatron names them:

* ``tensorwise``: one scale for a weight, and one per sequence for activations and gradients, from their present largest
  magnitude (current scaling);
* ``blockwise``: one for each 128 elements along the summed axis of activations and gradients, and for each 128 x 128
  elements of a weight (DeepSeek-V3, 2024). Blocks of tokens begin with each sequence.

So what is rounded together never depends on the size of a micro-batch. Scales are powers of two: rounding then depends
on them only near the ends of the range. Formats: ``e4m3`` for all operands, or ``hybrid``, where the gradients of
outputs are e5m2. Sums are in fp32. Rounding is part of the definition; its gradient is the product's
(straight-through) with the incoming gradient rounded, too.

The operators ``gemm_fp8_<recipe>`` are called as ``gemm`` is, and then with whether the format is hybrid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from hetero_megatron.ops.gemm import WeightGradients, add_up
from hetero_megatron.ops.spec import Bounds, Case, Kernel, OpSpec, normal, wide

TENSORWISE, BLOCKWISE = NAMES = ("gemm_fp8_tensorwise", "gemm_fp8_blockwise")
HYBRID = "e5m2 gradients"  # what a kernel may lack
BLOCK = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Quantised(NamedTuple):
    """``data`` [rows, n] in fp8, and what gives its values back, ``scale`` in fp32: [] (tensorwise), [rows, blocks of
    n] (1 x 128) or [blocks of rows, blocks of n] (128 x 128)."""

    data: torch.Tensor
    scale: torch.Tensor

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        scale, (rows, n) = self.scale.to(dtype), self.data.shape
        if scale.dim():
            if scale.shape[0] != rows:
                scale = scale.repeat_interleave(BLOCK, 0)[:rows]
            scale = scale.repeat_interleave(BLOCK, 1)[:, :n]
        return self.data.to(dtype) * scale


Product = Callable[[Quantised, Quantised, torch.dtype], torch.Tensor]  # a [m, n], b [k, n], dtype -> a b^T [m, k]
Quantise = Callable[[torch.Tensor, torch.dtype, str], Quantised]  # see quantise_blocks
QuantiseWhole = Callable[[torch.Tensor, torch.dtype, torch.Tensor, bool], Sequence[Quantised]]  # see quantise_whole


def scales(largest: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(the largest powers of two that keep values up to ``largest`` in the range of ``kind``, their inverses), in fp32.

    Of zeros they are 1. Casts to fp8 saturate, so what is not finite shows in the inverse, which is NaN then.
    """
    exponents = torch.frexp(torch.finfo(kind).max / largest.float()).exponent - 1
    exponent = torch.where(largest > 0, exponents.clamp(-126, 126), 0)
    return _power(exponent), torch.where(largest.isfinite(), _power(-exponent), torch.nan)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2 to the ``exponent`` (int32, -126 to 126) in fp32, exactly."""
    return (exponent + 127 << 23).view(torch.float32)


def largest_of(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of a weight [n, k] -> [], or of each sequence [b, s, k] -> [b]; 0 where there is nothing."""
    if not x.numel():
        return x.new_zeros(x.shape[:-2], dtype=torch.float32)
    return torch.linalg.vector_norm(x.detach(), math.inf, (-2, -1)).float()  # reads x once, and writes nothing else


def quantise_tensor(x: torch.Tensor, kind: torch.dtype, largest: torch.Tensor) -> Quantised:
    """[rows, n] with one scale: that of ``largest`` []."""
    scale, inverse = scales(largest, kind)
    return Quantised((x.to(wide(x.dtype)) * scale).to(kind), inverse)


def quantise_whole(x: torch.Tensor, kind: torch.dtype, largest: torch.Tensor, turned: bool) -> list[Quantised]:
    """[b, rows, n], each of the matrices with one scale, that of ``largest`` [b]; ``turned``: as [n, rows]."""
    quantised = [quantise_tensor(matrix, kind, top) for matrix, top in zip(x.unbind(0), largest.unbind(0), strict=True)]
    return [_turned(matrix) for matrix in quantised] if turned else quantised


def quantise_blocks(x: torch.Tensor, kind: torch.dtype, blocks: str) -> Quantised:
    """x [rows, n] with a scale for each ``1x128``, ``128x128`` or ``128x1`` elements; of the last the result is
    transposed, so that its blocks are 1 x 128 of [n, rows]."""
    if blocks == "128x1":
        x, blocks = x.t(), "1x128"
    rows = 1 if blocks == "1x128" else BLOCK
    height, width = x.shape
    padded = F.pad(x.to(wide(x.dtype)), (0, -width % BLOCK, 0, -height % rows))
    tiles = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, BLOCK))  # [_, rows, _, 128]
    if not tiles.numel():
        return Quantised(x.to(kind).contiguous(), tiles.new_ones(tiles.shape[0], tiles.shape[2], dtype=torch.float32))
    scale, inverse = scales(tiles.abs().amax((1, 3)), kind)
    data = (tiles * scale[:, None, :, None]).flatten(2).flatten(0, 1)[:height, :width].to(kind)
    return Quantised(data.contiguous(), inverse)


def exact_product(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """The definition: what was rounded to fp8, multiplied in at least fp32."""
    kind = wide(dtype)
    return (a.values(kind) @ b.values(kind).t()).to(dtype)


class Tensorwise:
    """One scale per weight and per sequence, over a product of matrices that have one each.

    Activations and gradients are [b, s, features]; ``kind``: the fp8 format of gradients; ``*_max``: largest magnitudes
    (:func:`largest_of`) over more than what is here.
    """

    def __init__(self, product: Product = exact_product, quantise: QuantiseWhole = quantise_whole) -> None:
        self.product, self._quantise = product, quantise

    def _quantised(
        self, x: torch.Tensor, kind: torch.dtype, largest: torch.Tensor | None, turned: bool = False
    ) -> Sequence[Quantised]:
        """Of each sequence of x [b, s, n]."""
        return self._quantise(x, kind, largest_of(x) if largest is None else largest, turned)

    def _weight(self, weight: torch.Tensor, largest: torch.Tensor | None, turned: bool = False) -> Quantised:
        return self._quantised(weight[None], E4M3, None if largest is None else largest.view(1), turned)[0]

    def _rows(self, rows: Sequence[Quantised], other: Quantised, dtype: torch.dtype) -> torch.Tensor:
        """Matrices [s, n] with ``other`` [k, n]^T -> [b, s, k]."""
        parts = [self.product(a, other, dtype) for a in rows]
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, x_max: torch.Tensor | None, weight_max: torch.Tensor | None
    ) -> torch.Tensor:
        whole_weight = self._weight(weight, weight_max)
        return self._rows(self._quantised(x, E4M3, x_max), whole_weight, x.dtype)

    def input(
        self, dy: torch.Tensor, weight: torch.Tensor, kind: torch.dtype, dy_max: torch.Tensor | None,
        weight_max: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        whole_weight = self._weight(weight, weight_max, turned=True)
        return self._rows(self._quantised(dy, kind, dy_max), whole_weight, dy.dtype)

    def weight(
        self, dy: torch.Tensor, x: torch.Tensor, kind: torch.dtype, dtype: torch.dtype, dy_max: torch.Tensor | None,
        x_max: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        a, b = self._quantised(dy, kind, dy_max, turned=True), self._quantised(x, E4M3, x_max, turned=True)
        total: torch.Tensor | None = None
        for pair in zip(a, b, strict=True):
            part = self.product(*pair, wide(dtype))
            total = part if total is None else total.add_(part)
            del part
        assert total is not None, "no sequences"
        return total.to(dtype)


def _turned(x: Quantised) -> Quantised:
    """Of one scale or of 128 x 128 blocks."""
    return Quantised(x.data.t(), x.scale.t() if x.scale.dim() else x.scale)


class Blockwise:
    """1 x 128 and 128 x 128 blocks, over a product of matrices that have them. It needs no largest magnitudes."""

    def __init__(self, product: Product = exact_product, quantise: Quantise = quantise_blocks) -> None:
        self.product, self.quantise = product, quantise

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, x_max: torch.Tensor | None, weight_max: torch.Tensor | None
    ) -> torch.Tensor:
        rows = self.quantise(x.flatten(0, 1), E4M3, "1x128")
        return self.product(rows, self.quantise(weight, E4M3, "128x128"), x.dtype).view(*x.shape[:2], weight.shape[0])

    def input(
        self, dy: torch.Tensor, weight: torch.Tensor, kind: torch.dtype, dy_max: torch.Tensor | None,
        weight_max: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        rows, columns = self.quantise(dy.flatten(0, 1), kind, "1x128"), _turned(self.quantise(weight, E4M3, "128x128"))
        return self.product(rows, columns, dy.dtype).view(*dy.shape[:2], weight.shape[1])

    def weight(
        self, dy: torch.Tensor, x: torch.Tensor, kind: torch.dtype, dtype: torch.dtype, dy_max: torch.Tensor | None,
        x_max: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        if len(dy) > 1 and (odd := -dy.shape[1] % BLOCK):  # one sequence may end in a shorter block
            dy, x = (F.pad(t, (0, 0, 0, odd)) for t in (dy, x))
        a, b = (self.quantise(t.flatten(0, 1), k, "128x1") for t, k in ((dy, kind), (x, E4M3)))
        return self.product(a, b, dtype)


class Fp8Gemm:
    """The operator over one recipe: forward, backward, and the parts that training calls, as ``gemm`` has them."""

    def __init__(self, recipe: Tensorwise | Blockwise) -> None:
        self.recipe = recipe

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, hybrid: bool,
        x_max: torch.Tensor | None = None, weight_max: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor]:  # fmt: skip
        if not x.numel() or not weight.numel():
            y = x.new_zeros(*x.shape[:-1], weight.shape[0])
        else:
            y = self.recipe.forward(x, weight, x_max, weight_max)
        return (y if bias is None else y + bias,)

    def input(
        self, dy: torch.Tensor, weight: torch.Tensor, hybrid: bool,
        dy_max: torch.Tensor | None = None, weight_max: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """[b, s, n], [n, k] -> [b, s, k]."""
        if not dy.numel() or not weight.numel():
            return dy.new_zeros(*dy.shape[:-1], weight.shape[1])
        return self.recipe.input(dy, weight, E5M2 if hybrid else E4M3, dy_max, weight_max)

    def weight(
        self, dy: torch.Tensor, x: torch.Tensor, hybrid: bool, into: torch.Tensor | None = None, beta: float = 1.0,
        dy_max: torch.Tensor | None = None, x_max: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """dy^T x [n, k], summed over tokens; added to ``into`` as ``gemm``'s is."""
        dtype = x.dtype if into is None else into.dtype
        if not dy.numel() or not x.numel():
            product = x.new_zeros(dy.shape[-1], x.shape[-1], dtype=dtype)
        else:
            product = self.recipe.weight(dy, x, E5M2 if hybrid else E4M3, dtype, dy_max, x_max)
        return add_up(product, dtype, into, beta)

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, hybrid: bool
    ) -> tuple[torch.Tensor | None, ...]:
        parts = self.input(dy, weight, hybrid), self.weight(dy, x, hybrid)
        return *parts, None if bias is None else dy.flatten(0, -2).sum(0)

    @property
    def parts(self) -> dict[str, Callable[..., Any]]:
        return {"input": self.input, "weight": self.weight}


class Maxima(Protocol):
    """How largest magnitudes of parts become those of whole tensors, where several ranks have parts: of (x, weight) in
    forward, of dy in backward."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(self, dy: torch.Tensor) -> torch.Tensor: ...


def bind_gemm_fp8(kernel: Kernel, gradients: WeightGradients, hybrid: bool) -> Callable[..., torch.Tensor]:
    """The differentiable product of one kernel plan: (x, weight, bias, maxima or None) -> y. Weight gradients are put
    off and given away as ``gemm``'s are; the scales of their operands are made here, so that they need no exchange."""
    run, for_input, for_weight = kernel.forward, kernel.parts["input"], kernel.parts["weight"]
    tensorwise = kernel.op == TENSORWISE

    class GemmFp8(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, maxima: Maxima | None
        ) -> torch.Tensor:
            largest: tuple[torch.Tensor, ...] = ()
            if tensorwise:
                largest = largest_of(x), largest_of(weight)
                largest = largest if maxima is None else maxima.forward(*largest)
            ctx.save_for_backward(x, weight, *largest)
            ctx.leaf, ctx.maxima = weight, maxima  # recomputation saves another tensor of the same values
            return run(x, weight, bias, hybrid, *largest)[0]  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
            x, weight, *largest = ctx.saved_tensors
            x_wanted, weight_wanted, bias_wanted, _ = ctx.needs_input_grad
            x_max = weight_max = dy_max = None
            if tensorwise:
                x_max, weight_max = largest
                dy_max = largest_of(dy) if ctx.maxima is None else ctx.maxima.backward(largest_of(dy))
            dx = for_input(dy, weight, hybrid, dy_max, weight_max) if x_wanted else None

            def product(
                dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0
            ) -> torch.Tensor:
                return for_weight(dy, x, hybrid, into, beta, dy_max, x_max)  # type: ignore[return-value]

            dw = gradients.gradient((ctx.leaf,), dy, x, product) if weight_wanted else None
            return dx, dw, dy.flatten(0, -2).sum(0) if bias_wanted else None, None

    return GemmFp8.apply


def _definition(gemm: Fp8Gemm) -> Callable[..., tuple[torch.Tensor]]:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, hybrid: bool
        ) -> torch.Tensor:
            ctx.save_for_backward(x, weight, bias)
            ctx.hybrid = hybrid
            return gemm.forward(x, weight, bias, hybrid)[0]

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            x, weight, bias = ctx.saved_tensors
            return *gemm.backward(grads[0], x, weight, bias, ctx.hybrid), None

    def definition(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, hybrid: bool
    ) -> tuple[torch.Tensor]:
        """x W^T + b with operands rounded to fp8. x: [b, s, k]; weight: [n, k]; bias: [n] or None -> [b, s, n]."""
        return (Rounded.apply(x, weight, bias, hybrid),)  # type: ignore[no-untyped-call]

    return definition


def _cases() -> Iterable[Case]:
    for name, lead, k, n, hybrid in (
        ("plain", (2, 6), 32, 24, False), ("plain, hybrid", (2, 6), 32, 24, True), ("odd", (3, 5), 17, 13, True),
        ("one", (1, 1), 1, 1, False), ("no rows", (2, 0), 8, 4, False), ("no columns", (2, 3), 8, 0, True),
        ("several blocks", (2, 75), 260, 144, False), ("one sequence", (1, 300), 40, 24, True),
        ("many rows", (1, 65_537), 1, 1, False),
    ):  # fmt: skip
        operands = normal(*lead, k, seed=1), normal(n, k, seed=2), normal(n, seed=3), hybrid
        yield Case(name, operands, (HYBRID,) * hybrid)
    outliers = normal(2, 20, 256, seed=4)
    outliers[1, 3, 5] = 3e4
    yield Case("one large value", (outliers, normal(24, 256, seed=2), None, False))
    yield Case("zeros", (torch.zeros(1, 6, 32, dtype=torch.float64), normal(5, 32, seed=2), None, False))
    yield Case("strided", (normal(6, 4, 8, seed=1).transpose(0, 1), normal(8, 5, seed=2).t(), None, False))


def _spec(name: str, reference: Fp8Gemm) -> OpSpec:
    definition = _definition(reference)
    return OpSpec(
        name=name, tensors=("x", "weight", "bias"), options=("hybrid",), results=("y",),
        parts=("input", "weight"), optional=("bias",), definition=definition, forward=reference.forward,
        backward=reference.backward, saves=("x", "weight", "bias"), gradients=("x", "weight", "bias"),
        fake=lambda x, weight, bias, hybrid: (x.new_empty(*x.shape[:-1], weight.shape[0]),),
        flops=lambda x, weight, bias, hybrid: 2 * x.numel() * weight.shape[0], cases=_cases, features=(HYBRID,),
        speed=lambda: Case("1024x512x512", (normal(1, 1024, 512, seed=1), normal(512, 512, seed=2), None, False)),
        schema=None,
        # What was rounded to fp8 is the same everywhere; sums differ, of which Hopper's units keep about 14 bits
        # (4.7e-5 on an H200), and results are rounded to 16 bits.
        bounds=Bounds((2e-4, 2e-4), (1e-3, 1e-3), (5e-3, 5e-3)),
    )  # fmt: skip


_REFERENCES = {TENSORWISE: Fp8Gemm(Tensorwise()), BLOCKWISE: Fp8Gemm(Blockwise())}
SPECS = tuple(_spec(name, reference) for name, reference in _REFERENCES.items())
REFERENCE_PARTS = {name: reference.parts for name, reference in _REFERENCES.items()}
