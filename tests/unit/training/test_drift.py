"""Chips that fall behind their rates: the cluster as it is now, and the launcher's bounded re-planning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.cli.configure import configure
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.cluster.edit import with_nodes, without_nodes
from hetero_megatron.errors import UserError
from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.launch.supervise import Supervisor, without_flag
from hetero_megatron.monitoring.stragglers import (
    BASELINE,
    DRIFT,
    DRIFT_FILE,
    RECENT,
    WARM_UP,
    StragglerReport,
    read_drift,
)
from hetero_megatron.planner.whatif.drift import slower, with_slow_nodes, worst_by_node
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.predictor.cost.rates import ChipRates, LayerRow
from hetero_megatron.predictor.simulate.step import predict
from tests.support.planner_cases import MODEL, chip_rates, plan, stages

LINK = {"alpha": 1e-6, "beta": 1e-12}


def document(count: int = 3, speed: float | None = None) -> dict[str, Any]:
    """``count`` nodes of one calibrated chip type, and one of another."""
    chip: dict[str, Any] = {"memory": "64 GiB", "dtypes": ["fp32"]}
    if speed is not None:
        chip["emulate"] = {"speed": speed}
    links = [{"within": g, **LINK} for g in ("slow", "fast")]
    links += [{"between": ends, **LINK} for ends in (["slow", "slow"], ["slow", "fast"])]
    links.append({"from": "fast", "to": "slow", "alpha": 5e-6, "beta": 2e-12})
    return {
        "nodes": [{"name": "slow", "count": count, "chip": "c"}, {"name": "fast", "chip": "d"}],
        "chips": {"c": chip, "d": dict(chip)},
        "links": {
            "inter_node": {"bandwidth": "50 MB/s"}, "pairs": [{"between": ["slow", "fast"], "bandwidth": "1 GB/s"}],
        },
        "rates": {"chips": {"c": {"fp32": chip_rates(1.0)}, "d": {"fp32": chip_rates(0.5)}}, "links": links},
    }  # fmt: skip


@settings(max_examples=10, deadline=None)
@given(st.floats(1.05, 20.0), st.integers(0, 2))
def test_a_node_that_takes_longer_is_predicted_to(factor: float, index: int) -> None:
    before = cluster_from_dict(document())
    after = cluster_from_dict(with_slow_nodes(document(), before, {f"slow-{index}": factor}, "fp32"))
    assert [r.node for r in after.ranks] == [r.node for r in before.ranks]
    assert {r.node: r.chip for r in after.ranks}[f"slow-{index}"] == f"c on slow-{index}"
    for rank in range(4):  # a plan of that rank alone takes as much longer as its chip does
        alone = plan_from_dict(plan((2, stages(11, first_rank=rank))), MODEL, before)
        was, now = (predict(alone, MODEL, c, "fp32").step_seconds for c in (before, after))
        assert now / was == pytest.approx(factor if rank == index else 1.0, rel=1e-9)
    for a in range(4):
        for b in range(4):
            if a != b:
                assert after.link(a, b) == before.link(a, b)


def test_a_chip_that_takes_twice_as_long_does_so_in_every_rate() -> None:
    """Rates of a new kind must not be forgotten: none but names, bytes and ratios stay as they are."""
    row = LayerRow("x", 1, 1, 128, 0.5, 1.0)
    numbers = {f.name: 2.0 for f in fields(ChipRates) if f.type == "float"}
    tables = {"gemm": ((8, 8, 8, 2.0),), "gemm_backward": ((8, 8, 8, 2.0, 2.0),)}
    tables |= {"attention": ((8, 1, 8, 2.0, 2.0),), "visits": ((8, 1, 8, 2.0, 2.0),)}
    of_layers = "waiting", "split_layers", "split_head", "elementwise", "selective", "decode_layers", "decode_head"
    tables |= dict.fromkeys(of_layers, (row,))
    tables |= {"experts": (("x", 4, *[2.0] * 10),)}
    tables |= {"optimizer": ((8, 2.0),), "newton_schulz": ((8, 8, 2.0),)}
    rates = ChipRates("a", "fp32", **numbers, **tables, layers=(row,))  # type: ignore[arg-type]
    twice = slower(rates, 2.0)
    same = {f.name for f in fields(ChipRates) if getattr(twice, f.name) == getattr(rates, f.name)}
    assert same == {
        "chip", "dtype", "gemm_half", "gradient_speed", "overhead_bytes", "embed", "head", "calibrated", "jitter",
        "spread",
    }  # fmt: skip
    assert (twice.gemm_flops, twice.pack_beta, twice.layers[0].backward) == (1.0, 4.0, 2.0)
    assert twice.visits[0][3:] == (4.0, 4.0) and twice.waiting == twice.layers
    assert twice.experts == (("x", 4, *[4.0] * 10),)


def test_drift_adds_up_and_an_emulated_chip_stays_slow() -> None:
    once = with_slow_nodes(document(speed=0.4), cluster_from_dict(document(speed=0.4)), {"slow-1": 2.0}, "fp32")
    twice = with_slow_nodes(once, cluster_from_dict(once), {"slow-1": 2.0}, "fp32")
    assert twice["chips"]["c on slow-1"]["emulate"]["speed"] == pytest.approx(0.1)
    assert list(twice["chips"]) == ["c", "d", "c on slow-1"]
    row = twice["rates"]["chips"]["c on slow-1"]["fp32"]["layers"][0]
    assert row[4:] == pytest.approx([4.0, 8.0])
    assert yaml.safe_load(yaml.safe_dump(twice)) == twice


def test_a_chip_of_the_catalogue_is_written_out() -> None:
    plain = {
        "nodes": [{"name": "n", "count": 2, "chip": "A100-80-SXM", "chips_per_node": 8}],
        "links": {"inter_node": {"bandwidth": "25 GB/s"}},
    }
    before = cluster_from_dict(plain)
    after = cluster_from_dict(with_slow_nodes(plain, before, worst_by_node(before.ranks, {3: 1.5, 5: 2.0}), "bf16"))
    assert after.chips["A100-80-SXM on n-0"].memory == before.chips["A100-80-SXM"].memory
    assert [r.chip for r in after.ranks] == ["A100-80-SXM on n-0"] * 8 + ["A100-80-SXM"] * 8


def test_lost_nodes_take_their_rates_with_them() -> None:
    left = without_nodes(document(), {"slow-0", "fast"})
    assert set(left["rates"]["chips"]) == {"c"} and "pairs" not in left["links"] or left["links"]["pairs"] == []
    cluster = cluster_from_dict(left)
    two = plan_from_dict(plan((1, stages(6, 5))), MODEL)
    assert [r.node for r in cluster.ranks] == ["slow-1", "slow-2"]
    assert predict(two, MODEL, cluster, "fp32").step_seconds > 0
    same = with_nodes(document(), lambda node, chip: chip)
    assert same == document()


class Scripted:
    """A round whose ranks end with given codes at once."""

    def __init__(self, codes: dict[int, int]) -> None:
        self.codes, self.ranks = codes, list(codes)

    def poll(self) -> dict[int, int]:
        return self.codes

    def hung(self) -> set[int]:
        return set()

    def signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


def supervise(tmp_path: Path, rounds: Sequence[dict[int, int]], **more: Any) -> tuple[int, list[Any], list[str]]:
    """(exit code, what was started in every round, what was said) of a launcher whose rounds end as told."""
    said: list[str] = []
    started: list[Any] = []
    setup = Setup(Path("plan-0"), (Seat("a", 0), Seat("b", 0)))

    def launch(setup: Setup, words: Sequence[str], number: int) -> Scripted:
        started.append((str(setup.plan), list(words), number))
        if DRIFT in rounds[number].values():
            (tmp_path / DRIFT_FILE).write_text(json.dumps({"step": 9, "dtype": "fp32", "ratios": {"1": 2.0}}))
        return Scripted(rounds[number])

    def replanner(setup: Setup, drift: Any, number: int) -> tuple[Setup, str]:
        assert drift["ratios"] == {1: 2.0}
        return Setup(Path(f"plan-{number}"), setup.seats), "b takes 2.00 times as long"

    words = ["--replan-on-drift", "1.5", "--lr", "1"]
    supervisor = Supervisor(
        setup, words, "restart", lambda *_: None, 1, 1.0, tmp_path, said.append, replanner, launch=launch, **more
    )
    return supervisor.run(), started, said


def test_drift_is_planned_around_and_then_left_alone(tmp_path: Path) -> None:
    drifted, done = {0: DRIFT, 1: 0}, {0: 0, 1: 0}
    code, started, said = supervise(tmp_path, [drifted, {0: 3, 1: -9}, drifted, done], max_replans=2)
    assert code == 0 and [plan for plan, _, _ in started] == ["plan-0", "plan-1", "plan-1", "plan-3"]
    assert ["--replan-on-drift" in words for _, words, _ in started] == [True, True, True, False]
    assert started[-1][1] == ["--lr", "1"] and any("not looked for any more" in text for text in said)
    assert not (tmp_path / DRIFT_FILE).exists()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert kinds and set(kinds) == {"launcher"}


def test_restarts_are_still_bounded(tmp_path: Path) -> None:
    failed = {0: 3, 1: -9}
    code, started, said = supervise(tmp_path, [failed, {0: DRIFT, 1: 0}, failed, failed], max_replans=1)
    assert code == 137 and len(started) == 3 and "gave up after 1 restart" in said[-1]


def test_flags_are_taken_out_in_either_spelling() -> None:
    assert without_flag(["--a", "1", "--b=2", "--c"], "--a") == ["--b=2", "--c"]
    assert without_flag(["--a", "1", "--b=2", "--c"], "--b") == ["--a", "1", "--c"]


@pytest.mark.parametrize(
    ("more", "environment", "says"),
    [
        ("--replan-on-drift 1.5", {}, "hetero-megatron run"),
        ("--replan-on-drift 1.0", {"HETERO_LAUNCHER": "1"}, "1.05 or more"),
        ("--replan-on-drift 2", {"HETERO_LAUNCHER": "1"}, "it needs --cluster and --save and --load"),
    ],
)
def test_what_cannot_be_planned_again_is_refused(more: str, environment: dict[str, str], says: str) -> None:
    words = "--model tiny --mock-data --seq-length 64 --micro-batch-size 1 --train-iters 2 --lr 1e-3 " + more
    with pytest.raises(UserError, match=says):
        configure(words.split(), environment)


@pytest.mark.parametrize("end", ["drift", "signal", "last step"])
def test_a_run_stops_for_a_new_plan_and_says_for_which_ranks(end: str, tmp_path: Path) -> None:
    """Unless a signal has stopped it meanwhile, or nothing is left to train."""
    said, failure = list[str](), SimpleNamespace(stragglers=False, replan_on_drift=1.5)
    checkpoint, made = SimpleNamespace(save=str(tmp_path)), SimpleNamespace(ranks=(0, 3), global_batch_size=8)
    config: Any = SimpleNamespace(failure=failure, plan=made, checkpoint=checkpoint, dtype="fp32", steps=50)
    reporter: Any = SimpleNamespace(
        is_first=True, chips={0: "a", 3: "b"}, expected_busy={}, say=said.append, event=lambda *_, **__: None
    )
    leave: Any = SimpleNamespace(reason="")
    report, steps = StragglerReport(config, reporter, leave), WARM_UP + BASELINE + RECENT
    for step in range(1, steps + 1):
        assert not leave.reason
        report.step(step, [1.0, 1.0 if step <= WARM_UP + BASELINE else 2.0], 8)
    assert leave.reason == "rank 3 drifted from its rate" and len(said) == 1
    if end == "signal":
        leave.reason = "received SIGTERM"
    assert report.wants_plan(50 if end == "last step" else steps) == (end == "drift")
    found = read_drift(tmp_path)
    assert found is None if end != "drift" else found is not None and found["ratios"] == {3: 2.0}
