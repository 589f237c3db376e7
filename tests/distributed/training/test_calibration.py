"""Calibration: which pipelines are run, how costs are told apart, and what is written into the cluster file."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy.optimize import least_squares

from hetero_megatron.cli.calibrate import main as calibrate_main
from hetero_megatron.cluster import cluster_from_dict, load_cluster
from hetero_megatron.cluster.rates_section import merge_rates, write_rates
from hetero_megatron.comm.hooks import Clock
from hetero_megatron.emulation.clock import EmulatedClock, OperatorSeconds
from hetero_megatron.errors import UserError
from hetero_megatron.planner.cost.layer_cost import CostModel, StageChoice
from hetero_megatron.planner.cost.rates import load_rates
from hetero_megatron.schedule import Costs as StageSeconds
from hetero_megatron.schedule import generate, lower, simulate
from hetero_megatron.spec import ModelSpec, load_model
from hetero_megatron.training.calibration import CalibrationOptions, calibrate
from hetero_megatron.training.calibration.alone import UPDATED, measure_alone, updates
from hetero_megatron.training.calibration.chips import Job, observe
from hetero_megatron.training.calibration.links import pairs
from hetero_megatron.training.calibration.runs import (
    FAR,
    MICRO_BATCHES,
    Costs,
    Observation,
    all_runs,
    degrees,
    depths,
    full_runs,
    slow_ranks,
    solve,
    spot_checks,
    steady,
    stragglers,
    tp_groups,
    waiting,
)
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.loop import optimizer_factory
from tests.support.pool import shared_pool

CLUSTER = {
    "nodes": [
        {"name": "fast", "count": 2, "chip": "big", "chips_per_node": 2},
        {"name": "slow", "count": 4, "chip": "small"},
    ],
    "chips": {
        "big": {"memory": "2 GiB", "dtypes": ["fp32"], "emulate": {"speed": 0.4}},
        "small": {"memory": "1 GiB", "dtypes": ["fp32"], "emulate": {"speed": 0.2}},
    },
    "links": {"intra_node": {"bandwidth": "2 GB/s"}, "inter_node": {"bandwidth": "50 MB/s"}},
}
SMALL = ModelSpec("small", "llama", 2, 32, 64, 2, 2, 16, 64, 64)


def test_every_chip_is_seen_first_and_last_and_in_between() -> None:
    cluster, spec = cluster_from_dict(CLUSTER), load_model("tiny")
    seen: dict[str, set[tuple[bool, bool, int]]] = {}
    for run in full_runs(cluster, spec, 64, tp=1, micro_batch_size=2, many={"big": 3, "small": 2}):
        for stage in (stage for pipeline in run.plan.pipelines for stage in pipeline.stages):
            (chip,) = {cluster.ranks[r].chip for r in stage.ranks}
            seen.setdefault(chip, set()).add((stage.embed, stage.head, stage.num_layers))
    assert set(seen) == {"big", "small"}
    for chip, many in (("big", 3), ("small", 2)):
        assert seen[chip] == {
            (True, False, 0), (True, False, many), (False, False, many), (False, True, 0), (False, True, many),
            (True, True, 1),
        }  # fmt: skip


def test_slower_chips_hold_fewer_layers_so_that_nobody_waits_for_them() -> None:
    def seen(chip: str, seconds: float) -> Observation:
        return Observation(chip, (0,), 1, 1, 1, True, True, seconds / 3, seconds * 2 / 3, 0.0)

    cluster = cluster_from_dict(CLUSTER)
    assert depths(cluster, []) == {"big": 3, "small": 3}
    for times, layers in ((1.1, 3), (1.5, 2), (3.0, 1), (100.0, 1)):
        assert depths(cluster, [seen("big", 0.1), seen("small", 0.1 * times)]) == {"big": 3, "small": layers}
    assert depths(cluster, [seen("big", 0.1)]) == {"big": 3, "small": 3}  # no group of those at this degree


def test_every_degree_and_size_has_its_runs_and_a_warm_up_that_fills_the_pipelines() -> None:
    cluster, spec, many = cluster_from_dict(CLUSTER), load_model("tiny"), {"big": 3, "small": 1}
    runs = all_runs(cluster, spec, 64, (2, 4), (1, 2), many)
    for kind in ((2, 1), (2, 2), (4, 1), (4, 2)):
        titles = [run.title for run in runs if (run.tp, run.micro_batch_size) == kind]
        assert len(titles) == len(set(titles)) == 5
    for run in runs:
        stages = [len(pipeline.stages) for pipeline in run.plan.pipelines]
        assert run.warm_up == run.micro_batch_size * sum(stages) < run.plan.global_batch_size
        assert (run.steps(3), run.steps(1)) == ((3, 1) if run.micro_batch_size == 1 else (1, 1))


def test_actions_count_where_all_stages_are_busy() -> None:
    for stages in range(1, 9):
        count = max(MICRO_BATCHES - 1, stages + 1)  # as few as there may be
        timeline = simulate(lower(generate("1f1b", stages, count)), StageSeconds([1.0] * stages, [2.0] * stages))
        last = [t for t in timeline.stages[-1] if t.action.kind in "FB"]
        for s, row in enumerate(timeline.stages):
            for kind in "FB":
                found = [t for t in row if t.action.kind == kind]
                at = [int(i) for i in steady(kind, list(range(count)), stages - 1 - s)]
                assert at and 0 not in at and at == list(range(at[0], at[-1] + 1))
                assert last[0].start <= found[at[0]].start and found[at[-1]].end <= last[-1].end
    cluster, spec = cluster_from_dict(CLUSTER), load_model("tiny")
    for run in full_runs(cluster, spec, 64, 2, 1, {"big": 3, "small": 1}):
        for pipeline in run.plan.pipelines:
            later = [{run.later_stages(rank) for rank in stage.ranks} for stage in pipeline.stages]
            assert later == [{n} for n in reversed(range(len(pipeline.stages)))]


def test_spot_checks_touch_every_other_group() -> None:
    cluster, spec = cluster_from_dict(CLUSTER), load_model("tiny")
    full = {r for run in full_runs(cluster, spec, 64, 1, 1, depths(cluster, [])) for r in run.plan.ranks}
    spots = {r for run in spot_checks(cluster, spec, 64, 1, 1) for r in run.plan.ranks}
    assert full | spots == set(range(cluster.world_size)) and not full & spots


def test_tp_groups_are_inside_nodes_or_else_over_nodes_of_a_type() -> None:
    cluster, spec = cluster_from_dict(CLUSTER), load_model("tiny")
    assert tp_groups(cluster, 1) == {"big": [(r,) for r in range(4)], "small": [(r,) for r in range(4, 8)]}
    assert tp_groups(cluster, 2) == {"big": [(0, 1), (2, 3)], "small": [(4, 5), (6, 7)]}
    assert tp_groups(cluster, 4) == {"big": [(0, 1, 2, 3)], "small": [(4, 5, 6, 7)]}
    assert tp_groups(cluster, 8) == {}
    assert degrees(cluster, spec) == (1, 2) and degrees(cluster, replace(spec, num_heads=1, num_kv_heads=1)) == (1,)
    single = {**CLUSTER, "nodes": [{"name": "slow", "count": 4, "chip": "small"}]}
    single["chips"] = {"small": CLUSTER["chips"]["small"]}
    assert degrees(cluster_from_dict(single), spec) == (1, 2)
    wide = {**CLUSTER, "nodes": [{"name": "fast", "count": 2, "chip": "big", "chips_per_node": 8}]}
    wide["chips"] = {"big": CLUSTER["chips"]["big"]}
    assert degrees(cluster_from_dict(wide), replace(spec, num_heads=16)) == (1, 2, 4, 8)


def _observe(costs: Costs, chip: str, ranks: tuple[int, ...], layers: int, embed: bool, head: bool, noise: float):  # type: ignore[no-untyped-def]
    forward, backward = costs.stage(layers, embed, head)
    return Observation(chip, ranks, 1, 1, layers, embed, head, forward * noise, backward * noise, 0.01)


PLACES = [(n, e, h) for n in (1, 3) for e, h in ((True, False), (False, False), (False, True))]


@pytest.mark.parametrize("seed", range(10))
def test_costs_are_recovered(seed: int) -> None:
    rng = random.Random(seed)
    fixed, *parts = [(rng.uniform(0.1, 1), rng.uniform(0.1, 2)) for _ in range(7)]
    truth = {1: Costs(fixed, *parts[:3]), 3: Costs(fixed, *parts[3:])}

    def observed(noise: float) -> list[Observation]:
        near = partial(rng.uniform, 1 - noise, 1 + noise)
        pairs = [(size, place) for size in truth for place in PLACES]
        return [
            replace(_observe(truth[size], "c", (0,), *place, near()), micro_batch_size=size) for size, place in pairs
        ]

    exact, noisy = solve(observed(0.0)), solve(observed(0.01))
    for size, costs in truth.items():
        for part in ("fixed", "layer", "embed", "head"):
            assert getattr(exact[1, size], part) == pytest.approx(getattr(costs, part), rel=1e-6)
        for place in PLACES:
            assert noisy[1, size].stage(*place) == pytest.approx(costs.stage(*place), rel=0.03)
    known = solve(observed(0.01), fixed)
    assert all(costs.fixed == fixed for costs in known.values())
    for size, costs in truth.items():
        assert known[1, size].stage(2, False, False) == pytest.approx(costs.stage(2, False, False), rel=0.03)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("counts", [(2,), (3,), (1, 1), (1, 3), (2, 2), (1, 1, 1), (1, 2, 5)])
@pytest.mark.parametrize("many", [1, 3])  # layers of slow chips and of fast ones
def test_the_runs_tell_every_cost_apart(counts: tuple[int, ...], tp: int, many: int) -> None:
    """However few chips a type has; groups of two chips are two nodes of one."""
    names = [f"chip-{i}" for i in range(len(counts))]
    nodes = [{"name": n, "count": tp * count, "chip": n} for n, count in zip(names, counts)]
    cluster = cluster_from_dict({**CLUSTER, "nodes": nodes, "chips": dict.fromkeys(names, CLUSTER["chips"]["small"])})
    truth = Costs((0.1, 0.2), (1.0, 2.0), (0.2, 0.1), (0.5, 1.0))
    seen: dict[str, list[Observation]] = {}
    for run in full_runs(cluster, load_model("tiny"), 64, tp, 1, dict.fromkeys(names, many)):
        for stage in (stage for pipeline in run.plan.pipelines for stage in pipeline.stages):
            assert stage.ranks and len(stage.ranks) == tp
            (chip,) = {cluster.ranks[r].chip for r in stage.ranks}
            place = (stage.num_layers, stage.embed, stage.head)
            seen.setdefault(chip, []).append(_observe(truth, chip, stage.ranks, *place, 1.0))
    assert set(seen) == set(names)
    for found in seen.values():
        (costs,) = solve(found).values()
        for part in ("fixed", "layer", "embed", "head"):
            assert getattr(costs, part) == pytest.approx(getattr(truth, part), rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_no_cost_is_negative_and_what_is_left_fits_best(seed: int) -> None:
    """Against scipy's; a stage with next to nothing besides its layers, so that noise makes some parts negative."""
    rng = random.Random(seed)
    truth = Costs((0.0, 0.001), (1.0, 2.0), (0.0, 0.001), (0.01, 0.0))
    found = [_observe(truth, "c", (0,), *place, rng.uniform(0.95, 1.05)) for place in PLACES * 2]
    costs = solve(found)[1, 1]
    rows = np.array([[1.0, *place] for place in PLACES * 2])
    for side, seconds in enumerate(([o.forward for o in found], [o.backward for o in found])):
        weighted = rows / np.array(seconds)[:, None]
        mine = np.array([getattr(costs, part)[side] for part in ("fixed", "layer", "embed", "head")])
        far = FAR * 1.48 * float(np.median(np.abs(weighted @ mine - 1)))
        best = least_squares(lambda x: weighted @ x - 1, [0.5] * 4, bounds=(0, np.inf), loss="huber", f_scale=far).cost  # noqa: B023
        assert (mine >= 0).all() and _huber(weighted @ mine - 1, far) <= best * 1.02


def _huber(off: np.ndarray, far: float) -> float:
    """As scipy's: half of the sum of squares, which go on as straight lines beyond ``far``."""
    return float(np.where(np.abs(off) <= far, off**2, 2 * far * np.abs(off) - far**2).sum()) / 2


def test_a_run_that_was_disturbed_moves_little() -> None:
    truth, rng = Costs((1e-3, 2e-3), (10e-3, 20e-3), (1e-3, 3e-3), (4e-3, 8e-3)), random.Random(1)
    found = [_observe(truth, "c", (0,), *place, rng.uniform(0.99, 1.01)) for place in PLACES * 2]
    odd = replace(found[3], forward=1.3 * found[3].forward, backward=1.3 * found[3].backward)
    found[3] = odd
    (costs,) = solve(found).values()
    assert costs.layer == pytest.approx(truth.layer, rel=0.02)
    rows = np.array([[1.0, *place] for place in PLACES * 2])
    plain, *_ = np.linalg.lstsq(rows, np.array([o.forward for o in found]), rcond=None)
    assert abs(plain[1] / truth.layer[0] - 1) > 2 * abs(costs.layer[0] / truth.layer[0] - 1)


def test_what_is_timed_alone_is_a_median_without_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of attention as a clock gives them that is told: 9 calls, of which the first and one more are slow."""
    clock, calls = Clock(), list[int]()
    forward, backward = [50.0, 3.0, 1.0, 2.0, 90.0, 2.0, 2.0, 1.0, 3.0], 2.0

    def settle() -> None:
        clock.computed += backward if len(calls) % 2 else forward[len(calls) // 2 % len(forward)]
        calls.append(1)

    monkeypatch.setattr(clock, "settle", settle)
    monkeypatch.setattr(clock, "work", nullcontext)
    monkeypatch.setattr(clock, "counting", nullcontext)
    monkeypatch.setattr("hetero_megatron.training.calibration.alone.OPTIMIZER_SETS", {})
    one: Any = SimpleNamespace(device=torch.device("cpu"), clock=clock)  # all of a Comm that is used
    job = Job(one, torch.float32, optimizer_factory(OptimizerConfig()))
    found = measure_alone(job, SMALL, (2,), calls=8)
    count = 2048 // 2  # attentions in a row, of which seconds are means
    assert found.attention == [(2, 2, 16, pytest.approx(2.0 / count), pytest.approx(backward / count))]
    assert found.spread == pytest.approx((90 - 1) / 2.0) and found.optimizer == found.visits == []


def test_updates_of_all_sizes_go_through_as_much_memory_before_they_come_back() -> None:
    updated: list[tuple[int, ...]] = []  # addresses

    class Noted(torch.optim.SGD):
        def step(self, *_: Any) -> None:  # type: ignore[override]
            updated.append(tuple(p.data_ptr() for p in self.param_groups[0]["params"]))

    one: Any = SimpleNamespace(device=torch.device("cpu"), clock=Clock())  # all of a Comm that is used
    job = Job(one, torch.float32, lambda groups: Noted([{"params": groups[0]["params"]}], lr=0.1))
    for elements, measure in updates(job).items():
        updated.clear()
        for _ in range(64):
            (seconds,) = measure()
            assert seconds > 0
        sets = UPDATED // elements
        assert len(set(updated)) == sets and updated[sets:] == updated[:-sets]


def test_waiting_in_tp_groups_is_what_exchanges_take_beyond_their_links() -> None:
    costs = Costs((0.1, 0.1), (1.0, 2.0), (0.2, 0.1), (0.5, 1.0))
    links = (0.01, 0.02)  # of two groups
    found = []
    for i, (layers, embed, head) in enumerate([(1, True, False), (3, False, True), (3, False, False)]):
        one = _observe(costs, "c", (0, 1), layers, embed, head, 1.0)
        swaps = 4 * layers + embed + head  # each way
        apart = (swaps * (0.15 + links[i % 2]), swaps * (0.25 + links[i % 2]))
        found.append(replace(one, tp=2, apart=apart))
        assert found[-1].swaps == swaps and one.swaps == 0
    assert waiting([(o, links[i % 2]) for i, o in enumerate(found)]) == pytest.approx((0.15, 0.25))
    assert waiting([(o, 0.2) for o in found]) == pytest.approx((0.0, 0.25 + (17 * 0.01 + 13 * 0.02) / 30 - 0.2))


def test_a_straggler_is_named() -> None:
    costs = Costs((0.1, 0.1), (1.0, 2.0), (0.2, 0.1), (0.5, 1.0))
    places = [(1, False, False), (3, False, False)]
    found = [_observe(costs, "c", (r,), *place, 1.3 if r == 2 else 1.0) for r in range(3) for place in places]
    slow = stragglers(found, {("c", 1, 1): costs}, 0.1)
    assert list(slow) == [(2,)] and slow[2,] == pytest.approx(1.3)


def test_slow_ranks_are_left_out_unless_nothing_is_left() -> None:
    costs = Costs((0.1, 0.1), (1.0, 2.0), (0.2, 0.1), (0.5, 1.0))
    seen = [_observe(costs, "c", ranks, 1, False, False, 1.0) for ranks in ((0,), (1,), (2,), (0, 1), (2, 3))]
    assert slow_ranks([(1,), (0, 1)], seen) == {1}  # rank 0 is slow only beside rank 1
    assert slow_ranks([(2, 3)], seen) == {2, 3}
    assert slow_ranks([(0,), (1,), (2, 3)], seen) == set()


def test_links_are_measured_once_per_kind_and_direction() -> None:
    cluster = cluster_from_dict(CLUSTER)
    kinds = {(cluster.ranks[a].group, cluster.ranks[b].group, cluster.ranks[a].node == cluster.ranks[b].node)
             for a, b in pairs(cluster)}  # fmt: skip
    assert kinds == {
        ("fast", "fast", True), ("fast", "fast", False), ("fast", "slow", False), ("slow", "fast", False),
        ("slow", "slow", False),
    }  # fmt: skip


def test_rates_are_written_without_touching_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    body = "# ours\nversion: 1\nnodes:\n  - {name: a, chip: c}\nchips:\n  c: {memory: 1 GiB}  # small\n"
    file.write_text(body + "rates:\n  chips:\n    c: {fp32: {gemm_flops: 1.0e9}}\n")
    new = {"chips": {"c": {"fp32": {"bytes_per_second": 2e9}, "bf16": {"gemm": [[1, 2, 3, 0.5]]}}}}
    write_rates(file, merge_rates(load_cluster(file).rates, new), file)
    assert file.read_text().startswith(body)
    again = load_cluster(file).rates
    assert again["chips"]["c"]["fp32"] == {"gemm_flops": 1e9, "bytes_per_second": 2e9}
    assert again["chips"]["c"]["bf16"] == {"gemm": [[1, 2, 3, 0.5]]}
    assert yaml.safe_load(file.read_text())["rates"] == again
    with pytest.raises(UserError, match="--out"):
        write_rates(file, again, tmp_path / "none" / "x.yaml")


def test_calibrations_of_other_shapes_add_up() -> None:
    def rates(length: int, seconds: float) -> dict[str, object]:
        rows = {"layers": [["m", 1, 2, length, seconds, 2 * seconds]], "optimizer": [[64, seconds]]}
        rows["step_seconds"] = seconds  # type: ignore[assignment]
        return {"chips": {"c": {"fp32": rows}}}

    merged = merge_rates(merge_rates(rates(128, 1.0), rates(256, 2.0)), rates(128, 3.0))["chips"]["c"]["fp32"]
    assert sorted(merged["layers"]) == [["m", 1, 2, 128, 3.0, 6.0], ["m", 1, 2, 256, 2.0, 4.0]]
    assert merged["optimizer"] == [[64, 3.0]] and merged["step_seconds"] == 3.0


def test_a_conformance_profile_is_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, profile = tmp_path / "cluster.yaml", tmp_path / "profile.json"
    file.write_text(yaml.safe_dump(CLUSTER))
    profile.write_text(json.dumps({"chips": {"big": {"fp32": {"gemm_flops": 3e9, "bytes_per_second": 1e9}}}}))
    assert calibrate_main(["--cluster", str(file), "--merge", str(profile), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chips"]["big"]["fp32"]["gemm_flops"] == 3e9
    assert load_rates(load_cluster(file), "fp32").chips["big"].calibrated


BAD = [
    (["--model", "tiny"], "--cluster"),
    (["--cluster", "FILE"], "--model"),
    (["--cluster", "FILE", "--model", "tiny"], "WORLD_SIZE"),
    (["--cluster", "FILE", "--model", "tiny", "--tp", "x"], "--tp = x: not a list"),
    (["--cluster", "FILE", "--model", "tiny", "--seq-length", "0"], "--seq-length = 0: not a list"),
    (["--cluster", "FILE", "--model", "tiny", "--tp", "1,8"], "--tp = 8: no chip type has so many chips"),
    (["--cluster", "FILE", "--model", "tiny", "--dtype", "bf16"], "big, small does not compute in it.* fp32"),
    (["--cluster", "FILE", "--model", "no-such-model"], "no-such-model"),
    (["--cluster", "FILE", "--merge", "/none.json"], "none.json"),
    (["--cluster", "FILE", "--model", "tiny", "--dtype", "fp32,int8", "--tp", "1"], "int8"),
    (["--cluster", "FILE", "--from-runs", "runs.csv", "--dtype", "fp32,bf16"], "the runs had one"),
    (["--cluster", "FILE", "--model", "tiny", "--tp", "1", "--micro-batch-sizes", "1,2,1"], "= 1,2,1: would be"),
    (["--cluster", "FILE", "--model", "tiny", "--tp", "1", "--dtype", "fp32,fp32"], "--dtype = fp32,fp32: would be"),
    (["--cluster", "FILE", "--model", "tiny", "--tp", "1", "--seq-length", "16,4096"], "= 4096: .* at most 2048"),
    (["--nonsense"], "nonsense"),
]


@pytest.mark.parametrize(("arguments", "names"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input(arguments: list[str], names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETERO_TESTBED", raising=False)
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(CLUSTER))
    with pytest.raises(UserError, match=names):
        if {"--tp", "--seq-length", "--dtype"} & set(arguments):
            launch = {"WORLD_SIZE": "8", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
            for name, value in launch.items():
                monkeypatch.setenv(name, value)
        calibrate_main([str(file) if a == "FILE" else a for a in arguments])


def _calibrate(comm, speeds):  # type: ignore[no-untyped-def]
    """All of calibration on real ranks, whose chips are emulated by the clock."""
    cluster = cluster_from_dict(CLUSTER)
    comm.clock = EmulatedClock(lambda: speeds[comm.rank], OperatorSeconds())
    build = optimizer_factory(OptimizerConfig())
    options = CalibrationOptions(32, "fp32", (2,), (1,), (32,), steps=1)
    try:
        found = calibrate(comm, cluster, SMALL, options, torch.float32, build, lambda _: None)
    finally:
        comm.clock = comm.hooks.clock
    return found.rates, found.slow, {key: costs.layer for key, costs in found.costs.items()}


def test_a_calibration_gives_what_the_clock_says() -> None:
    speeds = [4.0] * 4 + [2.0, 1.0, 2.0, 2.0]  # rank 5 is a straggler
    answers = shared_pool().run(_calibrate, speeds)
    assert all(answer == answers[0] for answer in answers)
    rates, slow, layer = answers[0]
    assert layer["small", 1, 2] == pytest.approx([2 * s for s in layer["big", 1, 2]], rel=0.02)
    assert set(slow) == {(5,)} and slow[5,] == pytest.approx(2.0, rel=0.1)
    big, small = (rates["chips"][chip]["fp32"] for chip in ("big", "small"))
    assert big["spread"] == small["spread"] == pytest.approx(0.0, abs=1e-3)  # nominal seconds do not vary
    for name in ("pack_beta", "add_beta", "unpack_beta"):  # of which the straggler measured a half
        assert small[name] == pytest.approx(2 * big[name], rel=0.1)
    cluster = cluster_from_dict({**CLUSTER, "rates": rates})
    costs = CostModel(SMALL, cluster, 32, "fp32")
    stage = StageChoice("big", 1, 1, 3, False, False)
    expected = 3 * layer["big", 1, 2][0] + costs.action_seconds("big")
    assert costs.forward_seconds(stage, 2) == pytest.approx(expected, rel=0.01)
    assert {link.get("within", link.get("from")) for link in rates["links"]} == {"fast", "slow"}


def _observe_groups(comm, speeds):  # type: ignore[no-untyped-def]
    """What each rank of TP groups over nodes sees in one run of calibration."""
    nodes = {"nodes": [{"name": "slow", "count": 8, "chip": "small"}], "chips": {"small": CLUSTER["chips"]["small"]}}
    run = full_runs(cluster_from_dict({**CLUSTER, **nodes}), SMALL, 32, 2, 2, {"small": 3})[1]
    comm.clock = EmulatedClock(lambda: speeds[comm.rank], OperatorSeconds())
    try:
        found = observe(run, "small", Job(comm, torch.float32, optimizer_factory(OptimizerConfig())), 3)
        return found and found.observation
    finally:
        comm.clock = comm.hooks.clock


def test_ranks_of_a_tp_group_over_nodes_wait_for_each_other() -> None:
    """Unlike chips in a group: the faster one computes for half as long, and is done at the same time."""
    seen = [o for o in shared_pool().run(_observe_groups, [2.0, 1.0] * 4) if o is not None]
    assert [o.ranks for o in seen] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    fast, slow, *_ = seen  # the other group holds no layers in this run
    assert slow.forward == pytest.approx(2 * fast.forward, rel=0.05)
    for way, compute in enumerate(("forward", "backward")):
        ends = [getattr(o, compute) + o.apart[way] for o in (fast, slow)]
        assert ends[0] == pytest.approx(ends[1], rel=0.1)
        assert fast.apart[way] - slow.apart[way] > 0.5 * getattr(fast, compute)


def test_one_call_measures_every_dtype_and_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETERO_TESTBED", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("HETERO_NODE", "slow")
    file = tmp_path / "cluster.yaml"
    chips = {"small": {"memory": "1 GiB", "dtypes": ["fp32", "fp64"]}}
    file.write_text(yaml.safe_dump({"nodes": [{"name": "slow", "count": 1, "chip": "small"}], "chips": chips}))
    chosen = ["--dtype", "fp64,fp32", "--seq-length", "16,32"]
    arguments = ["--cluster", str(file), "--model", "tiny", "--micro-batch-sizes", "1", "--steps", "1", *chosen]
    assert calibrate_main(arguments) == 0
    measured = load_cluster(str(file)).rates["chips"]["small"]
    assert calibrate_main([*arguments[:-3], "fp32", "--seq-length", "64"]) == 0
    later = load_cluster(str(file)).rates["chips"]["small"]["fp32"]
    assert later["action_seconds"] == measured["fp32"]["action_seconds"]  # of the shortest sequences: 16 tokens
    assert [row[3] for row in later["layers"]] == [16, 32, 64]
    assert set(measured) == {"fp64", "fp32"}
    for rows in measured.values():
        assert [row[1:4] for row in rows["layers"]] == [[1, 1, 16], [1, 1, 32]]
        assert [row[0] for row in rows["attention"]] == [16, 32]


def test_rates_of_cores_that_did_not_keep_up_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "testbed.json").write_text(json.dumps({"chips": "clock", "speeds": [1e3]}))  # no core can keep up
    monkeypatch.setenv("HETERO_TESTBED", str(tmp_path / "testbed.json"))
    monkeypatch.delenv("HETERO_TESTBED_DIR", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("HETERO_NODE", "slow")
    file = tmp_path / "cluster.yaml"
    nodes = [{"name": "slow", "count": 1, "chip": "small"}]
    file.write_text(yaml.safe_dump({"nodes": nodes, "chips": {"small": CLUSTER["chips"]["small"]}}))
    before = file.read_text()
    arguments = ["--cluster", str(file), "--model", "tiny", "--micro-batch-sizes", "1", "--steps", "1", "--tp", "1"]
    with pytest.raises(UserError, match="emulate.speed = 0.2: rank 0's core did not keep up"):
        calibrate_main([*arguments, "--seq-length", "16"])
    assert file.read_text() == before


def test_the_command_refuses_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hetero_megatron.cli.main", "calibrate", "--cluster", str(tmp_path / "none.yaml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr and "none.yaml" in done.stderr
