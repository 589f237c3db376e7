"""Calibration: which pipelines are run, how costs are told apart, and what is written into the cluster file."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from hetero_megatron.calibration import CalibrationOptions, Job, calibrate, links
from hetero_megatron.calibration.layers import StageTimes, fit_split, fit_stages, observe, stragglers
from hetero_megatron.calibration.measure import relative_spread, repeated, robust_fit
from hetero_megatron.calibration.pipelines import MICRO_BATCHES, Run, Runs, degrees, depths, steady
from hetero_megatron.cli.calibrate import main as calibrate_main
from hetero_megatron.cli.main import main
from hetero_megatron.cluster import Cluster, cluster_from_dict, load_cluster
from hetero_megatron.cluster.card_entries import FACTS
from hetero_megatron.cluster.rates_section import merge_rates, write_rates
from hetero_megatron.cluster.subset import link_pairs, tp_groups
from hetero_megatron.emulation.clock import EmulatedClock, NominalChip, OperatorSeconds
from hetero_megatron.errors import UserError
from hetero_megatron.predictor.cost.cost_options import StageChoice
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.rates import load_rates
from hetero_megatron.schedule import Costs as StageSeconds
from hetero_megatron.schedule import generate, lower, simulate
from hetero_megatron.spec import ModelSpec, load_model
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.train import optimizer_factory
from tests.support.pool import shared_pool
from tests.support.selection import each

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


Part = tuple[float, float]  # seconds, forward and backward


def runs_of(cluster: Cluster, tp: int, micro_batch_size: int = 1, without: tuple[int, ...] = ()) -> Runs:
    return Runs(cluster, load_model("tiny"), 64, tp, micro_batch_size, tp_groups(cluster, tp, without))


def places(runs: list[Run], cluster: Cluster) -> dict[str, set[tuple[bool, bool, int]]]:
    """By chip type: (embedding, head, layers) of its stages."""
    seen: dict[str, set[tuple[bool, bool, int]]] = {}
    for stage in (stage for run in runs for pipeline in run.plan.pipelines for stage in pipeline.stages):
        (chip,) = {cluster.ranks[r].chip for r in stage.ranks}
        seen.setdefault(chip, set()).add((stage.embed, stage.head, stage.num_layers))
    return seen


def test_every_chip_is_seen_first_and_last_and_in_between() -> None:
    cluster = cluster_from_dict(CLUSTER)
    runs = runs_of(cluster, tp=1, micro_batch_size=2)
    seen = places([runs.alone(), *runs.pipelines({"big": 3, "small": 2})], cluster)
    assert set(seen) == {"big", "small"}
    for chip, many in (("big", 3), ("small", 2)):
        assert seen[chip] == {
            (True, False, 0), (True, False, many), (False, False, many), (False, True, 0), (False, True, many),
            (True, True, 1),
        }  # fmt: skip


def test_slower_chips_hold_fewer_layers_so_that_nobody_waits_for_them() -> None:
    cluster = cluster_from_dict(CLUSTER)
    assert depths(cluster, {}) == {"big": 3, "small": 3}
    for times, layers in ((1.1, 3), (1.5, 2), (3.0, 1), (100.0, 1)):
        assert depths(cluster, {"big": 0.1, "small": 0.1 * times}) == {"big": 3, "small": layers}
    assert depths(cluster, {"big": 0.1}) == {"big": 3, "small": 3}  # no group of those at this degree


def test_a_warm_up_fills_the_pipelines_and_is_short() -> None:
    cluster = cluster_from_dict(CLUSTER)
    for tp, size in ((2, 1), (2, 2), (4, 1), (4, 2)):
        runs = runs_of(cluster, tp, size)
        for run in (runs.alone(1), *runs.pipelines({"big": 3, "small": 1})):
            stages = [len(pipeline.stages) for pipeline in run.plan.pipelines]
            assert size * sum(stages) <= run.warm_up < run.plan.global_batch_size


def test_actions_count_where_all_stages_are_busy() -> None:
    for stages in range(1, 9):
        batches = max(MICRO_BATCHES - 1, stages + 1)  # as few as there may be
        timeline = simulate(lower(generate("1f1b", stages, batches)), StageSeconds([1.0] * stages, [2.0] * stages))
        last = [t for t in timeline.stages[-1] if t.action.kind in "FB"]
        for s, row in enumerate(timeline.stages):
            for kind in "FB":
                found = [t for t in row if t.action.kind == kind]
                at = [int(i) for i in steady(kind, list(range(batches)), stages - 1 - s)]
                assert at and 0 not in at and at == list(range(at[0], at[-1] + 1))
                assert last[0].start <= found[at[0]].start and found[at[-1]].end <= last[-1].end


def test_every_chip_is_looked_at_once() -> None:
    cluster = cluster_from_dict(CLUSTER)
    for tp in (1, 2, 4):
        assert set(runs_of(cluster, tp).alone().plan.ranks) == set(range(cluster.world_size))
    assert len(runs_of(cluster, 1).alone(1).plan.ranks) == 2  # later on, one of each type


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


def test_slow_ranks_are_in_no_group_unless_there_is_no_other() -> None:
    cluster = cluster_from_dict(CLUSTER)
    assert tp_groups(cluster, 1, {5})["small"] == [(4,), (6,), (7,)]
    assert tp_groups(cluster, 2, {5})["small"] == [(6, 7)]
    assert tp_groups(cluster, 4, {5})["small"] == [(4, 5, 6, 7)]


TRUTH = {"fixed": (0.1, 0.1), "layers": (1.0, 2.0), "embed": (0.2, 0.1), "head": (0.5, 1.0)}
PLACES = [(n, e, h) for n in (0, 1, 3) for e, h in ((1, 0), (0, 0), (0, 1)) if n or e or h]


def seen_at(place: tuple[int, int, int], truth: dict[str, Part] = TRUTH, times: float = 1.0, **more: Any) -> StageTimes:
    """What a stage with ``place`` (layers, embeddings, heads) takes, ``times`` as long."""
    parts = [truth[name] for name in ("layers", "embed", "head")]
    forward, backward = (truth["fixed"][i] + sum(n * part[i] for n, part in zip(place, parts)) for i in (0, 1))
    fields = {"chip": "c", "fingerprint": "m", "ranks": (0,), "micro_batch_size": 1, **more}
    return StageTimes(parts=place, forward=forward * times, backward=backward * times, **fields)


@pytest.mark.parametrize("seed", range(10))
def test_costs_are_recovered(seed: int) -> None:
    rng = random.Random(seed)
    fixed = (rng.uniform(0.1, 1),) * 2
    truth = {
        size: {"fixed": fixed} | {t: (rng.uniform(0.1, 1), rng.uniform(0.1, 2)) for t in ("layers", "embed", "head")}
        for size in (1, 3)
    }

    def observed(noise: float) -> list[StageTimes]:
        pairs = [(size, place) for size in truth for place in PLACES * 2]
        near = [rng.uniform(1 - noise, 1 + noise) for _ in pairs]
        return [seen_at(place, truth[n], by, micro_batch_size=n) for (n, place), by in zip(pairs, near, strict=True)]

    action, exact, spread = fit_stages(observed(0.0))
    assert action == pytest.approx(fixed[0], rel=1e-6) and spread < 1e-6
    for size, costs in exact.items():
        for part, seconds in costs.items():
            assert seconds == pytest.approx(truth[size[2]][part], rel=1e-6)
    for known in (None, fixed[0]):
        action, noisy, spread = fit_stages(observed(0.01), known)
        assert known is None or action == known
        assert 0.001 < spread < 0.02
        for size in truth:
            for way in (0, 1):
                layer = truth[size]["layers"][way]
                assert action + 3 * noisy["m", 1, size]["layers"][way] == pytest.approx(fixed[0] + 3 * layer, rel=0.05)


def test_parts_of_a_backward_are_recovered() -> None:
    parts = {"layers": (1.2, 0.9), "embed": (0.1, 0.0), "head": (0.6, 0.5)}

    def took(place: tuple[int, int, int]) -> tuple[float, float]:
        first, second = (0.1 + sum(n * parts[t][i] for n, t in zip(place, parts)) for i in (0, 1))
        return first, second

    fixed, found, spread = fit_split([seen_at(place, split=took(place)) for place in PLACES])
    assert fixed == pytest.approx(0.1, rel=1e-4) and spread < 1e-5
    for part, seconds in found["m", 1, 1].items():
        assert seconds == pytest.approx(parts[part], abs=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("counts", [(2,), (3,), (1, 1), (1, 3), (2, 2), (1, 1, 1), (1, 2, 5)])
@pytest.mark.parametrize("many", [1, 3])  # layers of slow chips and of fast ones
def test_the_runs_tell_every_cost_apart(counts: tuple[int, ...], tp: int, many: int) -> None:
    """However few chips a type has; groups of two chips are two nodes of one."""
    names = [f"chip-{i}" for i in range(len(counts))]
    nodes = [{"name": n, "count": tp * number, "chip": n} for n, number in zip(names, counts)]
    cluster = cluster_from_dict({**CLUSTER, "nodes": nodes, "chips": dict.fromkeys(names, CLUSTER["chips"]["small"])})
    runs = runs_of(cluster, tp)
    found = places([runs.alone(1), *runs.pipelines(dict.fromkeys(names, many))], cluster)
    assert set(found) == set(names)
    for stages in found.values():
        action, costs, _ = fit_stages([seen_at((layers, int(e), int(h))) for e, h, layers in stages])
        assert action == pytest.approx(TRUTH["fixed"][0], rel=1e-6)
        for part, seconds in costs["m", 1, 1].items():
            assert seconds == pytest.approx(TRUTH[part], rel=1e-6)


@each("seed", range(20))
def test_outliers_move_little_and_nothing_is_negative(seed: int) -> None:
    """Rows as of stages with next to nothing besides their layers; every sixth measurement was disturbed."""
    rng = np.random.default_rng(seed)
    truth = np.array([0.0, 1.0, 0.001, 0.01])
    rows = np.array([[1.0, *place] for place in PLACES * 6])
    seconds = np.maximum(rows @ truth, 1e-3) * rng.normal(1.0, 0.01, len(rows))
    seconds[::6] *= 1.5
    found, spread = robust_fit(rows.tolist(), seconds.tolist())
    assert min(found) >= 0 and found[1] == pytest.approx(1.0, rel=0.03)
    assert 0.003 < spread < 0.05  # of the undisturbed ones
    weighted = rows / seconds[:, None]
    plain, *_ = np.linalg.lstsq(weighted, np.ones(len(rows)), rcond=None)
    assert abs(found[1] - 1) < abs(plain[1] - 1)


def test_what_takes_no_time_is_found() -> None:
    assert robust_fit([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], [0.0, 2.0, 2.0])[0] == pytest.approx([0.0, 2.0], abs=1e-4)
    assert robust_fit([[1.0], [1.0]], [0.0, 0.0])[0] == pytest.approx([0.0], abs=1e-9)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
def test_the_spread_of_noise_is_found(noise: float) -> None:
    drawn = np.random.default_rng(1).normal(2.0, 2.0 * noise, 4000)
    assert relative_spread(drawn.tolist()) == pytest.approx(noise, rel=0.05)
    drawn[::20] *= 10  # a few pauses change little
    assert relative_spread(drawn.tolist()) == pytest.approx(noise, rel=0.15)


def test_a_measurement_is_a_median_without_the_first_call() -> None:
    """Nine calls, of which the first and one more are slow."""
    calls, seconds = count(), [50.0, 3.0, 1.0, 2.0, 90.0, 2.0, 2.0, 1.0, 3.0]
    (first, spread), (second, none) = repeated(lambda: [seconds[next(calls)], 7.0], len(seconds) - 1)
    assert next(calls) == len(seconds) and (first, second, none) == (2.0, 7.0, 0.0)
    assert spread == relative_spread(seconds[1:]) > 0


def test_a_straggler_is_named() -> None:
    found = [seen_at((1, 1, 1), times=1.3 if r == 2 else 1.0, ranks=(r,)) for r in range(3)]
    found += [seen_at((1, 1, 1), times=2.0, ranks=(r,), chip="slower") for r in (3, 4)]  # another chip type
    slow = stragglers(found, 0.1)
    assert list(slow) == [(2,)] and slow[2,] == pytest.approx(1.3)
    assert stragglers([replace(o, spread=0.15) for o in found], 0.1) == {}  # may be noise


def test_links_are_measured_once_per_kind_and_direction() -> None:
    cluster = cluster_from_dict(CLUSTER)
    kinds = [(cluster.ranks[a].group, cluster.ranks[b].group, cluster.ranks[a].node == cluster.ranks[b].node)
             for a, b in link_pairs(cluster)]  # fmt: skip
    assert sorted(kinds) == [
        ("fast", "fast", False), ("fast", "fast", True), ("fast", "slow", False), ("slow", "fast", False),
        ("slow", "slow", False),
    ]  # fmt: skip


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
    job = Job(comm, torch.float32, optimizer_factory(OptimizerConfig()))
    options = CalibrationOptions(32, "fp32", (2,), (1,), (32,), steps=1)
    try:
        found = calibrate(job, cluster, SMALL, options, lambda _: None)
    finally:
        comm.clock = comm.hooks.clock
    return found.rates, found.slow


@pytest.mark.slow
def test_a_calibration_gives_what_the_clock_says() -> None:
    speeds = [4.0] * 4 + [2.0, 1.0, 2.0, 2.0]  # rank 5 is a straggler
    answers = shared_pool().run(_calibrate, speeds)
    assert all(answer == answers[0] for answer in answers)
    rates, slow = answers[0]
    assert set(slow) == {(5,)} and slow[5,] == pytest.approx(2.0, rel=0.1)
    big, small = (rates["chips"][chip]["fp32"] for chip in ("big", "small"))
    (layer,), (twice,) = big["layers"], small["layers"]
    assert twice[4:] == pytest.approx([2 * s for s in layer[4:]], rel=0.02)
    for table, whole in (("split_layers", layer[5]), ("split_head", big["head"][0][5])):
        (parts,), (longer,) = big[table], small[table]
        assert longer[4:] == pytest.approx([2 * s for s in parts[4:]], rel=0.02)
        assert sum(parts[4:]) == pytest.approx(whole, rel=1e-3)  # a split costs one more segment
    assert big["split_seconds"] == pytest.approx(NominalChip().segment_seconds / 4, rel=1e-3)
    for name in ("pack_beta", "add_beta", "unpack_beta"):
        assert small[name] == pytest.approx(2 * big[name], rel=0.1)
    for table in ("optimizer", "newton_schulz", "attention", "decode_layers", "decode_head"):
        assert small[table][-1][-1] == pytest.approx(2 * big[table][-1][-1], rel=0.1)
    for rows in (big, small):  # nominal seconds do not vary, and stages are sums of their parts
        assert rows["spread"]["layers"] < 0.01 and rows["spread"]["attention"] == 0.0 and rows["jitter"] < 1e-3
    cluster = cluster_from_dict({**CLUSTER, "rates": rates})
    costs = CostModel(SMALL, cluster, 32, "fp32")
    expected = 3 * layer[4] + costs.chip_rates("big").action_seconds
    assert costs.forward_seconds(StageChoice("big", 1, 1, 3, False, False), 2) == pytest.approx(expected, rel=0.01)
    assert {link.get("within", link.get("from")) for link in rates["links"]} == {"fast", "slow"}
    assert all(link["spread"] >= 0 for link in rates["links"])


def _observe_groups(comm, speeds):  # type: ignore[no-untyped-def]
    """What each rank of TP groups over nodes sees in one run of calibration."""
    nodes = {"nodes": [{"name": "slow", "count": 8, "chip": "small"}], "chips": {"small": CLUSTER["chips"]["small"]}}
    cluster = cluster_from_dict({**CLUSTER, **nodes})
    run = Runs(cluster, SMALL, 32, 2, 2, tp_groups(cluster, 2)).pipelines({"small": 3})[1]
    comm.clock = EmulatedClock(lambda: speeds[comm.rank], OperatorSeconds())
    try:
        return observe(run, "small", Job(comm, torch.float32, optimizer_factory(OptimizerConfig())), 3)
    finally:
        comm.clock = comm.hooks.clock


@pytest.mark.slow
def test_ranks_of_a_tp_group_over_nodes_wait_for_each_other() -> None:
    """Unlike chips in a group: the faster one computes for half as long, and is done at the same time. What they wait
    is measured, so a busy host may hide it in one run, but not in every one."""

    def is_seen(fast: StageTimes, slow: StageTimes) -> bool:
        pairs = [(fast.forward, slow.forward), (fast.backward, slow.backward)]
        ends = [(a + fast.waited[way], b + slow.waited[way]) for way, (a, b) in enumerate(pairs)]
        longer = all(fast.waited[way] - slow.waited[way] > 0.5 * a for way, (a, _) in enumerate(pairs))
        return longer and all(a == pytest.approx(b, rel=0.1) for a, b in ends)

    for _ in range(6):
        seen = [o for o in shared_pool().run(_observe_groups, [2.0, 1.0] * 4) if o is not None]
        assert [o.ranks for o in seen] == [(0, 1), (0, 1), (2, 3), (2, 3)]
        fast, slow, *_ = seen  # the other group holds no layers in this run
        assert slow.forward == pytest.approx(2 * fast.forward, rel=0.05)
        if is_seen(fast, slow):
            return
    pytest.fail(f"in no run: {fast}, {slow}")


def _measure_links_at_a_limit(comm, seconds):  # type: ignore[no-untyped-def]
    """Where the ranks of a pair want messages of unlike sizes, one of them the least size (an int, not a float)."""
    nodes = {"nodes": [{"name": "slow", "count": 8, "chip": "small"}], "chips": {"small": CLUSTER["chips"]["small"]}}
    before = links.LARGE_SECONDS, links.MAX_LARGE
    links.LARGE_SECONDS, links.MAX_LARGE = seconds[comm.rank], 2.5 * links.FIRST  # type: ignore[assignment]
    try:
        return len(links.measure_links(comm, cluster_from_dict({**CLUSTER, **nodes})))
    finally:
        links.LARGE_SECONDS, links.MAX_LARGE = before


@pytest.mark.parametrize("seconds", [[1e-9, 1e3], [1e3, 1e-9]])
def test_ranks_that_want_messages_of_unlike_sizes_agree(seconds: list[float]) -> None:
    assert set(shared_pool().run(_measure_links_at_a_limit, seconds * 4)) == {1}


@pytest.mark.slow
def test_one_call_measures_every_dtype_and_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert main(["cards", "contribute", str(file), "--as", "A6000", "--by", "me"]) == 2  # measured on a processor
    assert "vendor = cpu: not measured on A6000" in capsys.readouterr().err
    for rows in measured.values():
        assert set(rows["measured"]) == set(FACTS) and all(rows["measured"].values())
        assert [row[1:4] for row in rows["layers"]] == [[1, 1, 16], [1, 1, 32]]
        assert [row[0] for row in rows["attention"]] == [16, 32]


@pytest.mark.parametrize(("written", "said", "used"), [("", [], "auto"), ("bridge", [], "bridge"),
                                                       ("", ["--transport", "bridge"], "bridge")])  # fmt: skip
def test_links_are_those_of_the_transport_that_a_run_uses(
    written: str, said: list[str], used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def start(*arguments: Any) -> None:
        asked.append(arguments[-1])
        raise UserError("enough was seen")

    monkeypatch.setattr("hetero_megatron.comm.start_comm", start)
    monkeypatch.delenv("HETERO_TESTBED", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("HETERO_NODE", "slow")
    link = {"bandwidth": "1 GB/s", **({"transport": written} if written else {})}
    file = tmp_path / "cluster.yaml"
    nodes, chips = [{"name": "slow", "count": 1, "chip": "small"}], {"small": {"memory": "1 GiB", "dtypes": ["fp32"]}}
    file.write_text(yaml.safe_dump({"nodes": nodes, "chips": chips, "links": {"inter_node": link}}))
    with pytest.raises(UserError, match="enough was seen"):
        calibrate_main(["--cluster", str(file), "--model", "tiny", "--seq-length", "16", *said])
    assert asked == [used]


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
