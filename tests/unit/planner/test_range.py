"""The range in which a step is expected: from the spread of the rates that a plan uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.errors import UserError
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.predictor.cost.rates import load_rates
from hetero_megatron.predictor.cost.rates_document import as_document
from hetero_megatron.predictor.report.prediction import as_json, format_prediction, format_step_seconds
from hetero_megatron.predictor.simulate.step import Prediction, predict
from hetero_megatron.predictor.simulate.uncertainty import MODEL_ERROR, NINE_IN_TEN
from tests.support.planner_cases import MODEL, chip_rates, plan, stages

SHARE = st.integers(0, 30).map(lambda n: n / 100)


def two_types(first: Any, second: Any, link: float | None = None) -> Cluster:
    """A chip c and one d that takes twice as long, with the spreads of their rates and of the link between them."""
    chip = {"memory": "64 GiB", "dtypes": ["fp32"]}
    between = {"between": ["a", "b"], "alpha": 1e-3, "beta": 1e-9}
    rates = {
        name: {"fp32": chip_rates(seconds) | ({} if spread is None else {"spread": spread})}
        for name, seconds, spread in (("c", 1.0, first), ("d", 2.0, second))
    }
    links = [between if link is None else {**between, "spread": link}]
    return cluster_from_dict(
        {
            "nodes": [{"name": "a", "chip": "c"}, {"name": "b", "chip": "d"}], "chips": {"c": chip, "d": dict(chip)},
            "rates": {"chips": rates, "links": links},
        }  # fmt: skip
    )


def prediction(cluster: Cluster, *cuts: int) -> Prediction:
    """Of a pipeline whose stages have so many layers."""
    return predict(plan_from_dict(plan((4, stages(*cuts))), MODEL, cluster), MODEL, cluster, "fp32")


def half_width(found: Prediction) -> float:
    assert found.seconds_range is not None
    low, high = found.seconds_range
    assert 0 <= low <= found.step_seconds <= high
    return (high - low) / 2 / found.step_seconds


@settings(max_examples=30, deadline=None)
@given(SHARE, SHARE, SHARE)
def test_the_range_is_that_of_the_busiest_stage_and_widens(first: float, second: float, more: float) -> None:
    """Ten layers on the fast chip and one on the slow one: the fast one counts, whatever the other's spread."""
    found = prediction(two_types({"layers": first}, {"layers": second}), 10, 1)
    expected = ((first * NINE_IN_TEN) ** 2 + MODEL_ERROR**2) ** 0.5
    assert half_width(found) == pytest.approx(expected, rel=0.05, abs=1e-3)
    wider = prediction(two_types({"layers": first + more}, {"layers": second}), 10, 1)
    assert half_width(wider) >= half_width(found) and wider.step_seconds == found.step_seconds


def test_the_later_pipeline_may_be_another_one() -> None:
    """Replicas that end together: the step is early only if both are, and late if one is."""
    cluster = two_types({"layers": 0.02}, {"layers": 0.1})
    both = [(4, stages(11)), (2, stages(11, first_rank=1))]
    found = predict(plan_from_dict(plan(*both), MODEL, cluster), MODEL, cluster, "fp32")
    assert found.seconds_range is not None
    low, high = found.seconds_range
    assert found.step_seconds - low < 0.5 * (high - found.step_seconds)


def test_links_count_where_gradients_are_waited_for() -> None:
    both = [(4, stages(11)), (2, stages(11, first_rank=1))]

    def width(link: float | None, **family: float) -> float:
        cluster = two_types({"layers": 0.01, **family}, {"layers": 0.01, **family}, link)
        found = predict(plan_from_dict(plan(*both), MODEL, cluster), MODEL, cluster, "fp32")
        assert found.parts["gradients"] > 0
        return half_width(found)

    assert width(None) == width(0.0) < width(0.2) < width(0.4)
    assert width(0.2, exchange=0.1) == width(0.2) < width(0.2, exchange=0.3)


def test_without_measured_rates_there_is_no_range() -> None:
    for first, second in ((None, {"layers": 0.1}), ({"layers": 0.1}, None), ({"optimizer": 0.1}, {"layers": 0.1})):
        found = prediction(two_types(first, second), 6, 5)
        assert found.seconds_range is None and as_json(found)["seconds_range"] is None
        assert "(" not in format_step_seconds(found)
    chip = {"memory": "64 GiB", "dtypes": ["fp32"], "emulate": {"speed": 0.5}}
    cold = cluster_from_dict({"nodes": [{"name": "a", "chip": "c"}], "chips": {"c": chip}})
    assert prediction(cold, 11).seconds_range is None


def test_files_with_one_number_of_spread_still_load() -> None:
    old = prediction(two_types(0.05, 0.02), 10, 1)
    new = prediction(two_types({"layers": 0.05}, {"layers": 0.02}), 10, 1)
    assert old.seconds_range == new.seconds_range is not None
    cluster = two_types({"layers": 0.05, "exchange": 0.1}, 0.02, link=0.3)
    rates = load_rates(cluster, "fp32")
    assert as_document(rates.chips["c"])["spread"] == {"layers": 0.05, "exchange": 0.1}
    assert rates.between("a", "b").spread == 0.3


@pytest.mark.parametrize("bad", [{"layer": 0.1}, {"layers": -0.1}, {"layers": "much"}, "much", [0.1]])
def test_bad_spreads_are_refused_by_name(bad: Any) -> None:
    with pytest.raises(UserError, match=r"rates.chips.c.fp32.spread"):
        load_rates(two_types(bad, None), "fp32")


def test_seconds_are_said_with_their_range() -> None:
    found = replace(prediction(two_types({"layers": 0.01}, {"layers": 0.01}), 6, 5), step_seconds=1.2361)
    found = replace(found, seconds_range=(1.19, 1.2904))
    assert format_step_seconds(found) == "1.236 s (1.19-1.29)"
    assert "predicted step: 1.236 s (1.19-1.29)," in format_prediction(found)
    assert as_json(found)["seconds_range"] == [1.19, 1.2904]
    short = replace(found, step_seconds=0.5, seconds_range=(0.4, 1.5))
    assert format_step_seconds(short) == "500 ms (400-1500)"
