"""Rotary position embedding (Su et al., 2021) in Hugging Face's half layout: feature i turns with i + d/2."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from hetero_megatron.ops.bind import bind
from hetero_megatron.ops.spec import ATEN, Bounds, Case, Kernel, OpSpec, normal, reference_forward
from hetero_megatron.spec import Rope, RopeScaling


def rope_frequencies(rope: Rope, head_dim: int, long: bool = False) -> torch.Tensor:
    """Radians per position of every pair of features, fp64 on the CPU: half as many as features turn; where they are
    ``proportional``, [head_dim / 2] with zeros for those that do not.

    Args:
        long: the run's sequences are longer than the length that a ``longrope`` was made from.
    """
    scaling, turned_dims = rope.scaling, rope.turned(head_dim)
    kind = scaling.kind if scaling is not None else "default"
    dim_range = head_dim if kind == "proportional" else turned_dims
    freqs = 1.0 / rope.theta ** (torch.arange(0, turned_dims, 2, dtype=torch.float64) / dim_range)
    if scaling is None:
        return freqs
    if kind == "linear":
        return freqs / scaling.factor
    if kind == "proportional":
        return torch.cat([freqs / scaling.factor, freqs.new_zeros((head_dim - turned_dims) // 2)])
    if kind == "longrope":
        return freqs / torch.tensor(scaling.long_factor if long else scaling.short_factor, dtype=torch.float64)
    context = scaling.original_max_position_embeddings
    if kind == "yarn":
        unscaled = 1 - _yarn_ramp(rope.theta, scaling, turned_dims)
    else:  # Llama 3: long wavelengths are stretched, short ones kept, those between are blended
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        unscaled = ((context * freqs / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return freqs / scaling.factor * (1 - unscaled) + freqs * unscaled


def _yarn_ramp(theta: float, scaling: RopeScaling, turned: int) -> torch.Tensor:
    """0 for pairs that turn more than ``beta_fast`` times in the original length, 1 for those that turn less than
    ``beta_slow`` times, [turned / 2] (Peng et al., 2023)."""

    def pair(rotations: float) -> float:
        full = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return turned * math.log(full) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turned - 1)
    if low == high:
        high += 0.001  # as everybody does
    return ((torch.arange(turned // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)


def rope_tables(
    positions: torch.Tensor, freqs: torch.Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) times ``factor``, each [b, s, 1, pairs] in at least fp32; angles in fp64, so that long positions stay
    exact."""
    angles = positions.to(torch.float64)[..., None, None] * freqs.to(positions.device)
    wide_dtype = torch.promote_types(dtype, torch.float32)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos.mul_(factor), sin.mul_(factor)
    return cos.to(wide_dtype), sin.to(wide_dtype)


class Angles:
    """(cos, sin) of positions times frequencies, for a device: some have no fp64, and others are slow at it.

    What ``rope_tables`` computes is looked up: of position ``a * SPAN + b`` as the sum of two angles whose tables, made
    on the host in fp64, are small at any length. In fp32 it is 2e-7 from exact, at every position.

    Args:
        freqs: [pairs] fp64, on the CPU; length: of the run's sequences, 0: unknown.
    """

    SPAN = 1024

    def __init__(self, freqs: torch.Tensor, length: int, device: torch.device | str) -> None:
        spans = -(-length // self.SPAN) or self.SPAN
        self._freqs, self._device = freqs, device
        self._starts = torch.arange(spans) * self.SPAN
        self._tables: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}

    def tables(self, positions: torch.Tensor, dtype: torch.dtype, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """As of :func:`rope_tables`."""
        wide_dtype = torch.promote_types(dtype, torch.float32)
        if wide_dtype not in self._tables:
            rows = [
                rope_tables(starts[None], self._freqs, wide_dtype) for starts in (self._starts, torch.arange(self.SPAN))
            ]
            self._tables[wide_dtype] = tuple(x[0, :, 0].to(self._device) for pair in rows for x in pair)
        span, within = positions // self.SPAN, positions % self.SPAN
        cos_a, sin_a, cos_b, sin_b = (
            table[index][..., None, :]
            for table, index in zip(self._tables[wide_dtype], (span, span, within, within), strict=True)
        )
        cos, sin = cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b
        return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[b, s, heads, d] turned by [b, s, 1, d / 2]."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """``rope_reference`` by the angle times ``sign``, written straight into the result."""
    if torch.compiler.is_compiling():  # the compiler fuses the definition, and cannot write into views
        return rope_reference(x, cos, sin if sign == 1 else -sin)
    half = x.shape[-1] // 2
    wide_x = x.to(cos.dtype)
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    a, b = wide_x[..., :half], wide_x[..., half:]
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out[..., half:]).addcmul_(a, sin, value=sign)
    return out.to(x.dtype)


def _turn_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``rope_reference`` in place."""
    half = x.shape[-1] // 2
    wide_x = x.to(cos.dtype)
    a, b = wide_x[..., :half], wide_x[..., half:]
    first = torch.mul(a, cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).addcmul_(a, sin)
    a.copy_(first)
    return x if wide_x is x else x.copy_(wide_x)


def rope_forward(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the values lie as they came: they may be a part of a product whose rest is kept anyway."""
    if torch.compiler.is_compiling():
        return _turn(q, cos, sin, 1), _turn(k, cos, sin, 1)
    return _turn_(q, cos, sin), _turn_(k, cos, sin)


def rope_backward(
    dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rotation: backward is the rotation by the opposite angle, so q and k need not be saved."""
    return _turn(dq, cos, sin, -1), _turn(dk, cos, sin, -1)


def _rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [b, s, heads, d] and k [b, s, kv_heads, d] turned by cos, sin [b, s, 1, d / 2]."""
    return rope_reference(q, cos, sin), rope_reference(k, cos, sin)


def _reference_backward(
    dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_reference(dq, cos, -sin), rope_reference(dk, cos, -sin)


def _case(name: str, b: int, s: int, heads: int, kv_heads: int, d: int, first: int = 0) -> Case:
    positions = torch.arange(first, first + s).repeat(b, 1)
    cos, sin = rope_tables(positions, rope_frequencies(Rope(), d), torch.float64)
    return Case(name, (normal(b, s, heads, d, seed=4), normal(b, s, kv_heads, d, seed=5), cos, sin))


def _cases() -> Iterable[Case]:
    yield _case("plain", 2, 6, 3, 3, 16)
    yield _case("far", 1, 5, 4, 2, 8, first=100_000)
    yield _case("one", 1, 1, 1, 1, 2)
    yield _case("no heads", 2, 3, 0, 0, 8)
    yield _case("no KV heads", 2, 3, 2, 0, 8)
    yield _case("no tokens", 2, 0, 2, 1, 8)
    yield _case("odd half", 1, 7, 3, 1, 10)
    yield _case("many tokens", 1, 65_537, 1, 1, 4)
    case = _case("transposed", 2, 5, 4, 2, 8)
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.args[:2])
    yield Case(case.name, (*strided, *case.args[2:]))
    case = _case("parts of a wider buffer", 2, 5, 8, 1, 8)
    buffer = case.args[0]
    yield Case(case.name, (buffer[:, :, 1:4], buffer[:, :, 4:6], *case.args[2:]))


SPEC = OpSpec(
    name="rope", version=2, tensors=("q", "k", "cos", "sin"), options=(), results=("q_out", "k_out"),
    saves=("cos", "sin"), gradients=("q", "k"), definition=_rope, forward=reference_forward(_rope),
    backward=_reference_backward, wide=("cos", "sin"),
    fake=lambda q, k, cos, sin: (torch.empty_like(q), torch.empty_like(k)),
    flops=lambda q, k, cos, sin: 3 * (q.numel() + k.numel()), cases=_cases,
    bounds=Bounds((1e-6, 1e-6), (1e-3, 1e-3), (6e-3, 6e-3)), backward_flops=1.0,
    speed=lambda: _case("1024 tokens, 16 heads", 1, 1024, 16, 4, 64),
)  # fmt: skip
KERNELS = (
    Kernel(
        "rope", "aten", ATEN, rope_forward, rope_backward, version=2, traceable=True, overwrites=("q", "k"),
    ),
)  # fmt: skip
_apply = bind(SPEC, KERNELS[0])


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned, and what they were overwritten; see :func:`rope_reference`."""
    return _apply(q, k, cos, sin)  # type: ignore[no-any-return]
