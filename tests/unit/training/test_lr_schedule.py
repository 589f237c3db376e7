"""Learning rate and weight decay against Megatron's formulas written out, and their refusals."""

from __future__ import annotations

import math

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.errors import UserError
from hetero_megatron.training.config import ScheduleConfig
from hetero_megatron.training.lr_schedule import LearningRate, WeightDecay
from hetero_megatron.training.saved_state import differences


def test_warm_up_is_linear_and_starts_at_the_initial_rate() -> None:
    rate = LearningRate(1.0, 0.1, 0.2, "cosine", warmup=80, decay=800)
    assert rate.at(0) == 0.2
    assert rate.at(40) == pytest.approx(0.6)
    assert rate.at(80) == 1.0


def test_constant_ignores_the_decay() -> None:
    rate = LearningRate(0.5, style="constant", warmup=10)
    assert [rate.at(n) for n in (0, 5, 10, 11, 10**9)] == [0.0, 0.25, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("samples", [100, 101, 300, 777, 1000])
def test_shapes(samples: int) -> None:
    r = (samples - 100) / 900
    expected = {
        "linear": 0.1 + 0.9 * (1 - r),
        "cosine": 0.1 + 0.9 * 0.5 * (math.cos(math.pi * r) + 1),
        "inverse-square-root": max(0.1, math.sqrt(100) / math.sqrt(samples)),
    }
    for style, value in expected.items():
        assert LearningRate(1.0, 0.1, 0.0, style, 100, 1000).at(samples) == pytest.approx(value, rel=1e-14)


def test_the_end_is_the_minimum() -> None:
    for style in ("linear", "cosine", "inverse-square-root"):
        rate = LearningRate(1.0, 0.05, style=style, warmup=10, decay=100)
        assert rate.at(101) == 0.05
    assert LearningRate(1.0, 0.05, style="linear", decay=100).at(100) == pytest.approx(0.05)
    # At its last sample inverse square root is still above the minimum; Megatron jumps after it.
    assert LearningRate(1.0, 0.0, style="inverse-square-root", warmup=25, decay=100).at(100) == 0.5


WSD = {
    "linear": lambda r: 1 - r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1),
    "exponential": lambda r: 2 * 0.5**r - 1,
    "minus_sqrt": lambda r: 1 - math.sqrt(r),
}


@pytest.mark.parametrize("style", WSD)
def test_wsd(style: str) -> None:
    rate = LearningRate(2.0, 0.2, style="WSD", warmup=10, decay=100, wsd_style=style, wsd_decay=40)
    assert rate.at(5) == 1.0
    assert rate.at(11) == rate.at(60) == 2.0
    for n in (61, 80, 100):
        assert rate.at(n) == pytest.approx(0.2 + 1.8 * WSD[style]((n - 60) / 40), rel=1e-14)
    assert rate.at(100) == pytest.approx(0.2)
    assert rate.at(101) == 0.2


def test_weight_decay() -> None:
    assert WeightDecay(0.1, 0.1).at(0) == WeightDecay(0.1, 0.1).at(10**9) == 0.1
    assert WeightDecay(0.0, 0.4, "linear", 100).at(25) == pytest.approx(0.1)
    cosine = WeightDecay(0.1, 0.3, "cosine", 100)
    assert [cosine.at(n) for n in (0, 50, 100, 101)] == pytest.approx([0.1, 0.2, 0.3, 0.3])


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: LearningRate(1.0, style="exponential", decay=10), "--lr-decay-style = exponential.*WSD"),
        (lambda: LearningRate(1.0, 2.0, decay=10), "--min-lr = 2.0"),
        (lambda: LearningRate(1.0, initial=2.0, decay=10), "--lr-warmup-init"),
        (lambda: LearningRate(-1.0, decay=10), "--lr = -1.0"),
        (lambda: LearningRate(1.0, warmup=10, decay=10), "warm-up = 10"),
        (lambda: LearningRate(1.0, style="WSD", decay=10), "--lr-wsd-decay-iters"),
        (lambda: LearningRate(1.0, style="WSD", decay=10, wsd_decay=11), "--lr-wsd-decay-iters"),
        (lambda: LearningRate(1.0, style="WSD", decay=10, wsd_style="x"), "--lr-wsd-decay-style"),
        (lambda: WeightDecay(0.2, 0.1), "--end-weight-decay"),
        (lambda: WeightDecay(-0.1, -0.1), "^--weight-decay = -0.1"),
        (lambda: WeightDecay(-0.1, 0.1, "linear", 9), "^--start-weight-decay = -0.1"),
        (lambda: WeightDecay(0.1, 0.2), "--weight-decay-incr-style"),
        (lambda: WeightDecay(0.1, 0.2, "linear"), "length of training"),
    ],
)
def test_refusals(build, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()


def schedule(*flags: str) -> ScheduleConfig:
    """Of a run with a batch of 4."""
    words = ["--model", "tiny", "--mock-data", "--seq-length", "16", "--micro-batch-size", "1", "--lr", "1e-3"]
    config = configure([*words, "--global-batch-size", "4", *flags], {})
    assert config is not None
    return config.schedule


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("--train-iters 4 --lr-decay-style constant", "--train-iters 9 --lr-decay-style constant", ()),
        ("--train-iters 4 --lr-decay-iters 8", "--train-iters 9 --lr-decay-iters 8", ()),
        ("--train-iters 4", "--train-iters 9", ("--train-iters, where --lr-decay-iters is not given: 16 samples",)),
        ("--train-samples 16", "--train-samples 32", ("--train-samples, where --lr-decay-samples is not given",)),
        ("--train-iters 4", "--train-iters 4 --lr-decay-iters 8", ("--lr-decay-iters: 16 samples there, 32",)),
        ("--train-iters 4", "--train-iters 4 --min-lr 1e-5", ("--min-lr: 0 there, 1e-05 here",)),
        ("--train-iters 4", "--train-iters 4 --weight-decay 0.2", ("--weight-decay: 0.01 there, 0.2 here",)),
        ("--train-iters 4", "--train-iters 4 --lr-warmup-iters 1 --lr-decay-style cosine", ("-warmup-", "-style")),
    ],
)
def test_only_curves_that_differ_are_refused(before: str, after: str, said: tuple[str, ...]) -> None:
    old, new = schedule(*before.split()), schedule(*after.split())
    found = differences(old.learning_rate, old.weight_decay, new)
    assert len(found) == len(said) and all(a in b for a, b in zip(sorted(said), sorted(found), strict=True)), found
    if not said:
        assert all(old.learning_rate.at(n) == new.learning_rate.at(n) for n in range(0, 40, 4))
