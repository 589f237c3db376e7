"""Rates fitted to measured runs: known rates come back, error bars say what is not determined, files are read."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hetero_megatron.cli.main import main
from hetero_megatron.cluster import Cluster, cluster_from_dict, load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plans import dump_yaml, plan_from_dict
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.rates import Rates, load_rates
from hetero_megatron.predictor.measured_runs import MeasuredRun, median_step_seconds, read_runs
from hetero_megatron.predictor.rate_fitting import (
    _apply,
    _FitProblem,
    _Knob,
    _knobs,
    fit_rates,
    format_fit,
    predict_runs,
)
from tests.support.planner_cases import MODEL, plan, stages

FILE: dict[str, Any] = {
    "nodes": [{"name": "n", "count": 4, "chip": "c", "chips_per_node": 1}],
    "chips": {"c": {"memory": "64 GiB", "dtypes": ["fp32"], "tflops": {"fp32": 1}, "memory_bandwidth": "100 GB/s"}},
    "links": {"inter_node": {"bandwidth": "100 MB/s", "latency": "100 us"}},
}
SHAPES = [
    plan((8, stages(11))),
    plan((8, stages(6, 5))),
    plan((16, stages(3, 3, 3, 2))),
    plan((4, stages(6, 5)), (4, stages(6, 5, first_rank=2))),
    plan((2, stages(11)), (2, stages(11, first_rank=1))),
    plan((4, stages(11)), mbs=4),
    plan((8, stages(8, 3)), mbs=2),
]


def world() -> Cluster:
    return cluster_from_dict(FILE)


def runs_of(rates: Rates) -> list[MeasuredRun]:
    """What a cluster with these rates would measure."""
    runs = [MeasuredRun(plan_from_dict(shape, MODEL), MODEL, 1.0, str(i)) for i, shape in enumerate(SHAPES)]
    return [replace(run, seconds=s) for run, s in zip(runs, predict_runs(runs, rates, CostOptions()), strict=True)]


def test_known_rates_come_back() -> None:
    start = load_rates(world(), "fp32")
    chip = replace(start.chips["c"], gemm_flops=2e11, layer_seconds=0.0, layer_backward_seconds=0.0)
    link = replace(start.between("n", "n"), beta=3e-8)
    truth = Rates(start.cluster, "fp32", {"c": chip}, {("n", "n", False): link})
    fit = fit_rates(runs_of(truth), start, only=("gemm_flops", "beta", "step_seconds"))
    assert max(map(abs, fit.before)) > 0.3 and max(map(abs, fit.after)) < 0.02
    found = {rate.name: rate for rate in fit.fitted}
    assert found["c.gemm_flops"].value == pytest.approx(2e11, rel=0.1)
    assert found["link n-n.beta"].value == pytest.approx(3e-8, rel=0.25)
    assert found["c.gemm_flops"].determined and found["c.gemm_flops"].error < 1.2


def test_derivatives_without_synchronisation_are_those_of_whole_predictions() -> None:
    """Exact where nothing follows the pipelines but what does not move; close where synchronisation overlaps."""
    start = load_rates(world(), "fp32")
    runs = runs_of(start)
    options = CostOptions(overlap=False)
    knobs = _knobs(runs, start, ("gemm_flops", "action_seconds", "beta"))
    assert [k.computes for k in knobs] == [True, True, False]
    problem = _FitProblem(runs, start, options, knobs)
    at = np.array([0.1, -0.2, 0.3])
    found = problem.jacobian(at)
    for i in range(3):
        move = at.copy()
        move[i] -= 0.02
        whole = (problem.residuals(move) - problem.residuals(at)) / -0.02
        assert np.abs(found[:, i] - whole).max() <= 0.03 * np.abs(whole).max()
    assert np.array_equal(problem.jacobian(at)[:, 2], found[:, 2])  # kept for a few steps


def test_what_runs_do_not_show_is_not_determined() -> None:
    start = load_rates(world(), "fp32")
    alone = [run for run in runs_of(start) if run.plan.world_size == 1]
    two = [run for run in runs_of(start) if run.plan.world_size == 2]
    fit = fit_rates(alone, start)
    assert not [rate for rate in fit.fitted if rate.name.startswith("link")]  # they use none
    by_name = {rate.name: rate for rate in fit.fitted}
    assert not by_name["c.message_seconds"].determined and "not determined" in format_fit(fit)
    assert any(rate.name == "link n-n.beta" for rate in fit_rates(two, start, only=("beta",)).fitted)


def test_measured_layers_are_scaled_as_a_whole() -> None:
    from tests.support.planner_cases import cluster

    start = load_rates(cluster(1), "fp32")
    run = MeasuredRun(plan_from_dict(plan((4, stages(11))), MODEL), MODEL, 264.0)  # twice what the rows say
    fit = fit_rates([run], start, only=("layers",))
    assert fit.rates.chips["c0"].layers[0].forward == pytest.approx(2.0, rel=0.01)


def test_nothing_and_nonsense_are_refused() -> None:
    start = load_rates(world(), "fp32")
    with pytest.raises(UserError, match="nothing to fit"):
        fit_rates([], start)
    with pytest.raises(UserError, match="not a time"):
        fit_rates([replace(runs_of(start)[0], seconds=0.0)], start)


def write_runs(folder: Path) -> Path:
    (folder / "cluster.yaml").write_text(yaml.safe_dump(FILE))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, "step_seconds": s}) + "\n" for i, s in enumerate([9, 8, 0.5, 0.7, 0.6]))
    )
    tiny = plan((8, stages(3, 3)))
    (folder / "plan.yaml").write_text(dump_yaml(plan_from_dict(tiny, replace(MODEL, num_layers=6))))
    with (folder / "runs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows(
            [
                ["plan", "model", "seconds", "metrics"],
                ["plan.yaml", "tiny", "0.6", ""],
                ["plan.yaml", "tiny", "", "metrics.jsonl"],
            ]
        )
    return folder / "runs.csv"


def test_runs_are_read_from_files(tmp_path: Path) -> None:
    file = write_runs(tmp_path)
    found = read_runs(str(file), load_cluster(tmp_path / "cluster.yaml"))
    assert [run.seconds for run in found] == [0.6, 0.6]  # the median after two steps of warm-up
    (tmp_path / "short.jsonl").write_text('{"step": 0, "step_seconds": 1}\n')
    with pytest.raises(UserError, match="no step after the first 2"):
        median_step_seconds(tmp_path / "short.jsonl")
    file.write_text("\ufeff" + file.read_text())  # as Excel writes it
    assert len(read_runs(str(file), load_cluster(tmp_path / "cluster.yaml"))) == 2
    file.write_text("plan,model,seconds\nplan.yaml,tiny,fast\n")
    with pytest.raises(UserError, match=r"runs.csv:2: seconds = fast: not a number"):
        read_runs(str(file), load_cluster(tmp_path / "cluster.yaml"))
    file.write_text("plan,model\nplan.yaml,tiny\n")
    with pytest.raises(UserError, match=r"runs.csv:2: seconds: a column is missing"):
        read_runs(str(file), load_cluster(tmp_path / "cluster.yaml"))


def test_the_command_writes_fitted_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_runs(tmp_path), tmp_path / "fitted.yaml"
    words = ["calibrate", "--cluster", str(tmp_path / "cluster.yaml"), "--from-runs", str(file), "--dtype", "fp32"]
    assert main([*words, "--out", str(out)]) == 0
    assert "after: mean error" in capsys.readouterr().out
    fitted = load_rates(load_cluster(out), "fp32")
    assert fitted.chips["c"].calibrated
    run = read_runs(str(file), load_cluster(out))[0]
    assert predict_runs([run], fitted, CostOptions())[0] == pytest.approx(0.6, rel=0.05)


def test_both_directions_of_a_link_keep_what_they_are_beside_each_other() -> None:
    data = {
        "nodes": [{"name": n, "chip": "c"} for n in ("a", "b")], "chips": {"c": {**FILE["chips"]["c"]}},
        "rates": {"links": [{"from": "a", "to": "b", "beta": 1e-9}, {"from": "b", "to": "a", "beta": 4e-9}]},
    }  # fmt: skip
    start = load_rates(cluster_from_dict(data), "fp32")
    fitted = _apply(start, [_Knob("beta", link=("a", "b", False))], [np.log(3.0)])
    assert [fitted.between(*ends).beta for ends in ("ab", "ba")] == pytest.approx([3e-9, 12e-9])
