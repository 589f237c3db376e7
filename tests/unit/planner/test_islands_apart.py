"""Islands that train apart (`plan --allow-outer`): their shares of the batch against all shares, exchanges that change
training no more than they have to, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hetero_megatron.cli.main import main
from hetero_megatron.cli.run_plans import drift_in_place
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.cluster.subset import shrink
from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.whatif.islands_apart import WAITING, IslandsApart, _better, best_apart
from hetero_megatron.plans import load_plan
from hetero_megatron.plans.outer import COMPRESS
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import load_model

BATCH, EVERY = 8, 16


def far_apart(bandwidth: str, chips: tuple[int, int] = (2, 2)) -> dict[str, Any]:
    """Two nodes of unlike chips, with a slow link between them."""
    return {
        "version": 1,
        "nodes": [
            {"name": "here", "chip": "fast", "chips_per_node": chips[0]},
            {"name": "there", "chip": "slow", "chips_per_node": chips[1]},
        ],
        "chips": {
            "fast": {"memory": "24 GiB", "tflops": {"bf16": 120}, "memory_bandwidth": "900 GB/s", "dtypes": ["bf16"]},
            "slow": {"memory": "24 GiB", "tflops": {"bf16": 40}, "memory_bandwidth": "450 GB/s", "dtypes": ["bf16"]},
        },
        "links": {
            "intra_node": {"bandwidth": "20 GB/s", "latency": "10 us"},
            "inter_node": {"bandwidth": bandwidth, "latency": "30 us"},
        },
    }  # fmt: skip


def problem(bandwidth: str) -> PlanningProblem:
    options = SearchOptions(space=SearchSpace(more_schedules="never"))
    return PlanningProblem(load_model("gpt2"), cluster_from_dict(far_apart(bandwidth)), 256, BATCH, options)


def apart(bandwidth: str) -> IslandsApart:
    return best_apart(problem(bandwidth), EVERY)


@pytest.mark.slow
def test_shares_of_the_batch_are_nearly_the_best_of_all() -> None:
    asked = problem("20 MB/s")
    found = best_apart(asked, EVERY)
    assert found.plan.outer is not None and found.plan.outer.islands == ((0, 1), (2, 3))
    assert [node for (node,) in found.nodes] == ["here", "there"]
    alone = found.prediction.step_seconds - found.prediction.parts["outer"]
    least = min(
        max(search(asked.on(shrink(asked.cluster, ranks)).with_batch(size)).best.step_seconds
            for ranks, size in (((0, 1), batch), ((2, 3), BATCH - batch)))
        for batch in range(1, BATCH)
    )  # fmt: skip
    assert alone <= 1.1 * least  # the islands meet once in every step, for loss and norm
    again = predict(found.plan, asked.model, asked.cluster, options=asked.options.costs)
    assert again.step_seconds == pytest.approx(found.prediction.step_seconds)


@pytest.mark.slow
def test_slower_links_never_get_exchanges_that_change_training_less() -> None:
    """In the order of the settings: whether they go on beside the computing, in how many bits, how often."""
    forms, before = list(COMPRESS), (0, 0, 0)
    for bandwidth in ("5 GB/s", "200 MB/s", "20 MB/s"):
        found = apart(bandwidth)
        outer = found.plan.outer
        assert outer is not None and outer.every <= EVERY and outer.every % outer.fragments == 0
        now = outer.delay, forms.index(outer.compress), outer.every
        assert now >= before, bandwidth
        assert found.waiting <= WAITING or now[:2] == (1, len(forms) - 1) and outer.every == EVERY
        before = now
    assert before > (0, 0, 2)


@pytest.mark.parametrize(
    ("islands", "seconds", "than", "better"),
    [(2, 0.99, 2, True), (2, 1.0, 2, False), (4, 0.96, 2, False), (4, 0.95, 2, True), (2, 1.04, 4, True),
     (2, 1.06, 4, False)],
)  # fmt: skip
def test_more_islands_have_to_be_worth_it(islands: int, seconds: float, than: int, better: bool) -> None:
    """As training changes more: a twentieth at least, as outer steps have to be themselves."""
    found, other = (
        (SimpleNamespace(outer=SimpleNamespace(islands=range(count))), SimpleNamespace(step_seconds=took))
        for count, took in ((islands, seconds), (than, 1.0))
    )
    assert _better(found, other) == better  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_command_writes_the_faster_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, out = tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    words = ["plan", "--model", "gpt2", "--seq-length", "256", "--global-batch-size", "512", "--cluster", str(cluster),
             "--more-schedules", "never", "--allow-outer", "16", "--out", str(out)]  # fmt: skip
    cluster.write_text(yaml.safe_dump(far_apart("200 MB/s", (1, 3))))
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["outer"] and said["speedup"] > 1.2 and "outer:" in out.read_text()
    cluster.write_text(yaml.safe_dump(far_apart("20 GB/s", (1, 3)) | {"links": {
        "intra_node": {"bandwidth": "20 GB/s", "latency": "10 us"}, "inter_node": {"bandwidth": "20 GB/s"},
    }}))  # fmt: skip
    assert main([*words, "--quiet"]) == 0
    assert "outer:" not in out.read_text() and "so the plan is one without" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--allow-outer", "1"], "--allow-outer"),
        (["--allow-outer", "8", "--for", "megatron"], "--for: --allow-outer knows nothing of it"),
        (["--allow-outer", "8", "--lora-rank", "4"], "--allow-outer = 8: there are no outer steps for adapters"),
    ],
)
def test_refused(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(far_apart("20 MB/s")))
    asked = ["--model", "gpt2", "--seq-length", "256", "--global-batch-size", "8", "--cluster", str(cluster)]
    assert main(["plan", *asked, *words]) == 2
    err = capsys.readouterr().err
    assert message in err and len([line for line in err.splitlines() if "error" in line]) == 1, err


def test_an_island_that_became_slow_gets_fewer_sequences(tmp_path: Path) -> None:
    """In proportion to what it takes now, which is faster than any plan whose gradients cross the slow link."""
    cluster, plan = tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    cluster.write_text("""
version: 1
nodes: [{name: here, chip: c}, {name: there, chip: c}]
chips: {c: {memory: 24 GiB, tflops: {fp32: 1}, memory_bandwidth: 900 GB/s}}
links: {inter_node: {bandwidth: 25 MB/s, latency: 1 ms}}
""")
    plan.write_text("""
seq_length: 64
global_batch_size: 32
outer: {islands: [0, 1], every: 64, fragments: 2, compress: int4}
pipelines:
  - {micro_batch_size: 1, num_micro_batches: 16, stages: [{ranks: 0, layers: [0, 12]}]}
  - {micro_batch_size: 1, num_micro_batches: 16, stages: [{ranks: 1, layers: [0, 12]}]}
""")
    setup = Setup(plan, (Seat("here", 0), Seat("there", 0)), cluster)
    words = ["--model", "gpt2", "--mock-data", "--lr", "1e-3", "--train-iters", "9"]
    planner, slow = drift_in_place(words, tmp_path, 1), tmp_path / "slow.yaml"
    for factor, counts in ((1.0, None), (3.0, [24, 8]), (7.0, [28, 4])):
        planner.slow(cluster, slow, {"there": factor} if factor > 1 else {}, "fp32")
        found = planner.better(setup, 1)(setup.seats, slow)
        assert found is not None and (found == plan) == (counts is None)
        moved = load_plan(str(found), load_model("gpt2"))
        assert moved.outer is not None and [p.num_micro_batches for p in moved.pipelines] == (counts or [16, 16])
