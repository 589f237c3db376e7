"""Dropout: which elements stay is a function of their place alone, by a published generator."""

from __future__ import annotations

import random

import pytest
import torch

from hetero_megatron.errors import UserError
from hetero_megatron.ops.dropout import (
    Draws,
    ScoreDropout,
    definition,
    derived_key,
    kept,
    kept_scores,
    philox,
    scale_of,
    words,
)
from hetero_megatron.ops.registry import torch_registry
from hetero_megatron.spec import Dropout

# Random123's kat_vectors, philox4x32 10: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def hexadecimal(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_philox_gives_the_published_vectors(counter: str, key: str, result: str) -> None:
    low, high = hexadecimal(key)
    assert philox(hexadecimal(counter), (low, high)) == hexadecimal(result)
    made = philox([torch.tensor([word]) for word in hexadecimal(counter)], (low, high))
    assert tuple(int(word) for word in made) == hexadecimal(result)
    assert words(low | high << 32) == (low, high)


def test_masks_are_defined_by_philox_word_by_word() -> None:
    """Written out for single elements, in Python's integers."""
    key, dropped, rng = 2**63 + 99, 20_000, random.Random(0)
    rows = torch.arange(3, 8).view(5, 1), 7, torch.arange(2).view(1, 2)
    found = kept(key, dropped, (13, 61), rows, (5, 2))
    assert found.shape == (5, 2, 48)
    for _ in range(200):
        i, j, column = rng.randrange(5), rng.randrange(2), rng.randrange(13, 61)
        word = philox((column // 8, 3 + i, 7, j), words(key))[column % 8 // 2]
        number = word >> 16 if column % 2 else word & 0xFFFF
        assert found[i, j, column - 13] == (number >= dropped)
    for counters in ((7, 9), (2**32 - 1, 2**32 - 1)):  # of which no product fits into 64 bits
        numbers = kept(key, dropped, (0, 8), (*counters, torch.arange(2)), (2,))
        for j in range(2):
            made = philox((0, *counters, j), words(key))
            expected = [half >= dropped for word in made for half in (word & 0xFFFF, word >> 16)]
            assert numbers[j].tolist() == expected


def test_the_mask_of_a_part_is_the_part_of_the_mask() -> None:
    """Any rows, tokens and features of hidden states; any rows, heads, queries and keys of probabilities."""
    rng, ones = random.Random(1), torch.ones(6, 19, 83, dtype=torch.float64)
    key = derived_key(5, 1, 0, 2, 3)
    tokens = torch.arange(19)
    (whole,) = definition(ones, tokens, 0.4, key, 100, 0)
    scores = ScoreDropout(0.4, key, 100, 8)
    whole_scores = kept_scores(scores, (6, 5, 19, 37), torch.device("cpu"))

    def cut(n: int) -> tuple[int, int]:
        a, b = sorted(rng.sample(range(n + 1), 2))
        return a, b

    for _ in range(50):
        (a, b), (e, f) = cut(6), cut(83)
        some = torch.tensor(sorted(rng.sample(range(19), rng.randint(1, 19))))  # a zigzag's tokens do not follow on
        (part,) = definition(ones[a:b, : len(some), e:f], some, 0.4, key, 100 + a, e)
        assert torch.equal(part, whole[a:b, some, e:f])
        (h, i), (q, r), (k, n) = cut(5), cut(19), cut(37)
        here = scores._replace(sample=100 + a, head=8 + h, q_start=q, k_start=k)
        shape = (b - a, i - h, r - q, n - k)
        assert torch.equal(kept_scores(here, shape, torch.device("cpu")), whole_scores[a:b, h:i, q:r, k:n])
        assert scores.of(a, q, k)._replace(head=8 + h) == here


def test_large_masks_are_made_in_runs_that_do_not_show() -> None:
    tokens = torch.arange(300)
    (whole,) = definition(torch.ones(2, 300, 4096), tokens, 0.1, 77, 0, 0)
    for a in (0, 17, 299):
        (row,) = definition(torch.ones(2, 1, 4096), tokens[a : a + 1], 0.1, 77, 0, 0)
        assert torch.equal(row, whole[:, a : a + 1])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_stays_is_that_of_the_rate(rate: float) -> None:
    """And so in every lane, row and column: chi-square of 6 sigma, with a fixed key."""
    n = 256 * 1024
    stay = definition(torch.ones(1, 256, 1024), torch.arange(256), rate, 4321, 0, 0)[0] != 0
    sigma = (rate * (1 - rate)) ** 0.5
    assert abs(stay.double().mean() - (1 - rate)) < 4 * sigma / n**0.5
    for axis in (1, 2):
        counts = stay.sum(axis)[0].double()
        trials = stay.shape[axis]
        chi = ((counts - trials * (1 - rate)).square() / (trials * rate * (1 - rate))).sum()
        assert abs(chi - len(counts)) < 6 * (2 * len(counts)) ** 0.5
    assert scale_of(rate) == pytest.approx(1 / (1 - rate), rel=2e-4)


def test_streams_are_independent() -> None:
    """Masks of other seeds, steps, layers, sites and samples agree as often as independent ones do; of equal ones,
    everywhere."""
    shape, rate = torch.ones(1, 64, 512), 0.5

    def mask(seed: int, step: int, layer: int, site: int, sample: int) -> torch.Tensor:
        draws = Draws(seed, step, sample)
        return definition(shape, torch.arange(64), rate, draws.key(layer, site), sample, 0)[0] != 0

    first, changes = (3, 5, 2, 1, 9), [(2**40, 0), (1, 0), (1, 1), (2**33, 1), (1, 2), (1, 3), (1, 4)]
    places = [first, *(tuple(x + by * (i == at) for i, x in enumerate(first)) for by, at in changes)]
    masks = [mask(*place) for place in places]
    for i, one in enumerate(masks):
        assert torch.equal(one, mask(*places[i]))
        for other in masks[i + 1 :]:
            agree = (one == other).double()
            assert abs(agree.mean() - 0.5) < 5 * 0.5 / agree.numel() ** 0.5
    # Neighbouring tokens and features, too.
    for shift, axis in ((1, 1), (1, 2), (8, 2)):
        agree = (masks[0] == masks[0].roll(shift, axis)).double()
        assert abs(agree.mean() - 0.5) < 5 * 0.5 / agree.numel() ** 0.5


def test_gradients_are_autograds_of_the_masked_formula() -> None:
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    options = (torch.arange(5), 0.3, 11, 4, 0)
    from hetero_megatron.ops.kernel_plan import resolve
    from hetero_megatron.ops.spec import Signature

    plan = resolve(torch_registry(), [Signature("dropout", "cpu", torch.float64)])
    seed = torch.randn(2, 5, 24, dtype=torch.float64)
    (found,) = torch.autograd.grad(plan.dropout(x, *options), x, seed)
    stays = definition(torch.ones_like(x), *options)[0].detach()
    (want,) = torch.autograd.grad(x * stays, x, seed)
    assert torch.equal(found, want) and torch.equal(plan.dropout(x, *options), x * stays)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan"), float("inf"), "0.1", True, 1e-6, 1 - 1e-9])
def test_rates_that_are_none_are_refused(rate: object) -> None:
    for field in ("hidden", "attention"):
        with pytest.raises(UserError) as caught:
            Dropout(**{field: rate})  # type: ignore[arg-type]
        assert caught.value.field == field and caught.value.accepted
