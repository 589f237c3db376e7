"""Dropout as a pure function of (seed, step, layer, site, sample, token, feature), so that no plan changes it.

No mask is ever stored: backward, and forward where it runs again, make it anew. Which elements stay is defined by
``ops/dropout.py``; a stream's key is that of (seed, step, layer, site), and the counters of an element are

    of hidden states:  (feature // 8, token, 0, sample)
    of attention:      (key token // 8, query token, query head, sample)

all of them numbers in the whole model and the whole run, modulo 2**32. Keys and samples are integers, or int64 [] on
the device of what is dropped: a graph that is captured once reads them there whenever it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hetero_megatron.ops.spec import ATEN, Case, Kernel, OpSpec, normal, reference_forward, wide
from hetero_megatron.spec.dropout import UNITS, dropped_units

ROUNDS = 10
WORD = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
LANES = 8  # numbers of 16 bits that a block has
_CHUNK = 1 << 14  # counters that are worked on at once: they stay in the cache


def philox(counter: Sequence[Any], key: tuple[Any, Any], rounds: int = ROUNDS) -> tuple[Any, ...]:
    """Four words of 32 bits from four; integers, or int64 tensors or arrays that broadcast (products may wrap)."""
    (a, b, c, d), (x, y) = counter, key
    for _ in range(rounds):
        # b and d are only ever xored, and what is above their 32 bits is masked with the result.
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = ((q >> 32) ^ b ^ x) & WORD, q, ((p >> 32) ^ d ^ y) & WORD, p
        x, y = (x + WEYL[0]) & WORD, (y + WEYL[1]) & WORD
    return a, b & WORD, c, d & WORD


def words(key: Any) -> tuple[Any, Any]:
    """A key of 64 bits, an integer or int64 tensors, as two words, the low one first."""
    return key & WORD, key >> 32 & WORD


def derived_key(key: int, *counter: int) -> int:
    """The key of 64 bits of one of 2**128 independent streams: four words of 32 bits say which."""
    low, high, _, _ = philox(counter, words(key))
    return int(low | high << 32)


def kept(
    key: int | torch.Tensor, dropped: int, columns: tuple[int, int], rows: Sequence[torch.Tensor | int],
    shape: Sequence[int], device: torch.device | str = "cpu",
) -> torch.Tensor:  # fmt: skip
    """bool [*shape, columns]: which elements stay of those that are dropped with probability ``dropped`` / 2**16.

    An element's random number of 16 bits is a function of the key, its row's three counters and its column's number:
    lane ``column % 8`` of block ``column // 8``, low halves of the words first. It stays if its number is at least
    ``dropped``.

    Args:
        key: an integer, or int64 [].
        columns: their numbers, half-open.
        rows: three counters of 32 bits, integers or int64 tensors that broadcast to ``shape``.
    """
    first, end = columns[0] // LANES, max(-(-columns[1] // LANES), columns[0] // LANES)
    groups: Any = torch.arange(first, end, device=device)
    flat: list[Any] = [x if isinstance(x, int) else x.expand(shape).reshape(-1, 1) for x in rows]
    count = math.prod(shape)
    out = torch.empty(count, end - first, LANES, dtype=torch.bool, device=device)
    drawn: Any
    at_least: Any
    step, drawn, at_least = max(count, 1), out, torch.ge
    if out.device.type == "cpu":  # NumPy takes a third to all of torch's time for these integers
        step, drawn, at_least = max(_CHUNK // max(end - first, 1), 1), out.numpy(), np.greater_equal
        groups, key = groups.numpy(), int(key)
        # Products of Python's integers do not wrap, and NumPy takes none of more than 64 bits.
        flat = [np.broadcast_to(x, (count, 1)) if isinstance(x, int) else x.numpy() for x in flat]
    for a in range(0, count, step):
        part = [x if isinstance(x, int) else x[a : a + step] for x in flat]
        for i, word in enumerate(philox((groups, *part), words(key))):
            at_least(word & 0xFFFF, dropped, out=drawn[a : a + step, :, 2 * i])
            at_least(word, dropped << 16, out=drawn[a : a + step, :, 2 * i + 1])
    numbers = out.view(*shape, (end - first) * LANES)
    return numbers[..., columns[0] - first * LANES : columns[1] - first * LANES]


Tensor = torch.Tensor
Number = int | Tensor  # int64 []
# Where elements are dropped; part of the key. An adapter's number is ADAPTER + that of its projection.
EMBEDDING, AFTER_ATTENTION, AFTER_MLP, SCORES, ADAPTER = range(5)


@dataclass(frozen=True)
class Draws:
    """What a micro-batch's random numbers depend on, besides the place in the model.

    Attributes:
        sample: global index of its first row; those of the others follow it.
        table: int64 [layers, 1 + sites], for layers that run as device graphs: the sample,
            and the layer's keys (:func:`draw_keys`).
    """

    seed: int
    step: int
    sample: int
    table: Tensor | None = None

    def key(self, layer: int, site: int) -> int:
        """Of the stream of random numbers of one place in one step."""
        return derived_key(self.seed, self.step & WORD, self.step >> 32, layer, site)


def draw_keys(seed: int, step: int, layers: Sequence[int], sites: int) -> Tensor:
    """The keys of sites 0 .. sites - 1 of some layers in one step, int64 [layers, sites]."""
    places = torch.tensor(layers, dtype=torch.int64)[:, None], torch.arange(sites)
    low, high, _, _ = philox((step & WORD, step >> 32, *places), words(seed))
    return low | high << 32  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TabledDraws:
    """:class:`Draws` of one layer, read on the device: ``row`` of the table."""

    row: Tensor

    @property
    def sample(self) -> Tensor:
        return self.row[0]

    def key(self, layer: int, site: int) -> Tensor:
        return self.row[1 + site]


class ScoreDropout(NamedTuple):
    """Dropout of attention probabilities, as an option of the operator ``attention``.

    Attributes:
        rate: probability that one becomes 0; the others are divided by 1 - rate.
        key: of the stream, 64 bits.
        sample, head: global numbers of the first row and of the first query head.
        q_start, k_start: global numbers of the first query token and of the first key token.
    """

    rate: float
    key: Number
    sample: Number
    head: int
    q_start: int = 0
    k_start: int = 0

    def of(self, row: int, query: int, key: int) -> ScoreDropout:
        """That of a part which begins at these places of the whole."""
        return self._replace(
            sample=self.sample + row, q_start=self.q_start + query, k_start=self.k_start + key
        )


def scale_of(rate: float) -> float:
    """What stays is multiplied by this: 1 / (1 - the rate, which is a multiple of 2**-16)."""
    return UNITS / (UNITS - dropped_units(rate))


def kept_scores(dropout: ScoreDropout, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """[rows, heads, queries, keys] bool: the probabilities that stay."""
    rows, heads, queries, keys = shape

    def numbers(first: Number, count: int, axis: int) -> Tensor:
        return ((torch.arange(count, device=device) + first) & WORD).view([-1 if i == axis else 1 for i in range(3)])

    counters = (
        numbers(dropout.q_start, queries, 2), numbers(dropout.head, heads, 1), numbers(dropout.sample, rows, 0)
    )  # fmt: skip
    columns = (dropout.k_start, dropout.k_start + keys)
    return kept(dropout.key, dropped_units(dropout.rate), columns, counters, (rows, heads, queries), device)


def score_factors(dropout: ScoreDropout, like: Tensor) -> Tensor:
    """What probabilities [rows, heads, queries, keys] are multiplied by, in the dtype of ``like``."""
    rows, heads, queries, keys = like.shape
    return kept_scores(dropout, (rows, heads, queries, keys), like.device).to(like.dtype).mul_(scale_of(dropout.rate))


def definition(
    x: Tensor, tokens: Tensor, rate: float, key: Number, sample: Number, feature: int
) -> tuple[Tensor]:
    """Elements of x [b, s, features] that are dropped become 0, the others are divided by 1 - rate.

    Args:
        tokens: [s] int64, the global number of each token.
        rate: 0 <= rate < 1, rounded to a multiple of 2**-16.
        key: of the stream, 64 bits; sample: global index of the first row; feature: number of the first one.
    """
    b, s, features = x.shape
    rows = ((torch.arange(b, device=x.device) + sample) & WORD).view(b, 1)
    counters = (tokens.view(1, s), 0, rows)
    stay = kept(key, dropped_units(rate), (feature, feature + features), counters, (b, s), x.device)
    return ((x.to(wide(x.dtype)) * scale_of(rate) * stay).to(x.dtype),)


def _backward(dy: Tensor, tokens: Tensor, *options: object) -> tuple[Tensor]:
    """The same as forward: no mask was kept."""
    with torch.no_grad():
        return definition(dy, tokens, *options)  # type: ignore[arg-type]


def _cases() -> Iterable[Case]:
    big = 2**63 + 12345
    for name, shape, options in (
        ("plain", (2, 5, 32), (0.25, 7, 0, 0)), ("odd", (3, 7, 13), (0.5, big, 11, 0)),
        ("one", (1, 1, 1), (0.5, 3, 0, 0)), ("no tokens", (2, 0, 8), (0.1, 3, 0, 0)),
        ("nothing dropped", (1, 4, 16), (0.0, 3, 0, 0)), ("nearly all dropped", (2, 16, 64), (0.99, 3, 0, 0)),
        ("features from the middle", (2, 3, 19), (0.3, big, 5, 37)),
        ("samples beyond 32 bits", (3, 2, 16), (0.3, big, 2**32 - 1, 8)), ("wide", (1, 3, 5003), (0.1, 9, 2, 0)),
        ("many rows", (1, 65_537, 3), (0.1, 9, 2, 0)),
    ):  # fmt: skip
        yield Case(name, (normal(*shape, seed=1), torch.arange(shape[1]) * 3 + 1, *options))
    on_device = torch.tensor([big - 2**64, 2**32 - 1])
    yield Case("numbers on the device", (normal(2, 5, 32, seed=1), torch.arange(5), 0.25, *on_device.unbind(), 3))
    yield Case("offset view", (normal(2, 6, 40, seed=1)[:, 1:5, 3:27], torch.tensor([9, 4, 2**31, 2**32 - 1]),
                               0.4, big, 1, 0))  # fmt: skip


SPEC = OpSpec(
    name="dropout", tensors=("x", "tokens"), options=("rate", "key", "sample", "feature"), schema=None,
    results=("y",), saves=("tokens",), gradients=("x",), definition=definition, forward=reference_forward(definition),
    backward=_backward, fake=lambda x, *_: (torch.empty_like(x),), flops=lambda x, *_: 20 * x.numel(), cases=_cases,
    backward_flops=1.0,
    speed=lambda: Case("1024x1024", (normal(1, 1024, 1024, seed=0), torch.arange(1024), 0.1, 7, 0, 0)),
)  # fmt: skip
KERNELS = (Kernel("dropout", "aten", ATEN, SPEC.forward, _backward),)
