"""How a plan divides weights: spellings, owners, buckets, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.layout import Box
from hetero_megatron.plans import Plan, dump_yaml, load_plan, plan_from_dict
from hetero_megatron.plans.buckets import make_buckets
from hetero_megatron.plans.canonical import WeightSharding
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.program import sync_actions
from hetero_megatron.spec import Lora, adapted, logical_tensors, stage_tensors
from hetero_megatron.spec.adapted_model import gathered_bytes
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.presets import load_model
from hetero_megatron.training.runtime_options import RuntimeOptions, stages_fit
from hetero_megatron.utils.yaml_document import parse_document
from tests.support.refusals import refused
from tests.support.small_plans import LLAMA, pipe, plan, stage

SPEC = load_model("tiny")
ENDS = [0, SPEC.num_layers]
PIPELINED = ["--pipeline-model-parallel-size", "2"]


def _plan(*stages: dict[str, Any], spec: Any = SPEC) -> Plan:
    return plan_from_dict(plan([pipe(4, 2, *stages)], 64), spec)


def _one(weights: Any, ranks: int = 2, /, **more: Any) -> Plan:
    return _plan({"ranks": list(range(ranks)), "layers": ENDS, "weights": weights, **more})


def test_spellings() -> None:
    for spelled, expected in (
        ({}, WeightSharding((1, 1))),
        ({"shard": [2, 2]}, WeightSharding((1, 1))),
        ({"shard": [6, 0], "gather": "micro-batch"}, WeightSharding((1, 0), "micro-batch")),
        ({"gather": "step"}, WeightSharding((1, 1), "step", False)),
        ({"gather": "step", "reshard_after_forward": False}, WeightSharding((1, 1), "step", False)),
        ({"shard": [3, 1], "reshard_after_forward": False}, WeightSharding((3, 1), "layer", False)),
    ):
        made = _one(spelled)
        assert made.stages[0].weights == expected
        assert load_plan(parse_document(dump_yaml(made), "plan.yaml"), SPEC) == made
    whole = _plan(stage([0, 1], ENDS))
    assert len({whole.fingerprint(), _one({}).fingerprint(), _one({"shard": [2, 1]}).fingerprint()}) == 3


def test_refusals() -> None:
    first = "pipelines[0].stages[0]"
    for weights, ranks, more, field, words in (
        ({"shard": [1]}, 2, {}, "weights.shard", ("1 share for 2 ranks", "one share per rank")),
        ({"shard": [0, 0]}, 2, {}, "weights.shard", ("nobody keeps anything",)),
        ({"shard": [1, -1]}, 2, {}, "weights.shard[1]", ("0",)),
        ({"gather": "epoch"}, 2, {}, "weights.gather", ("layer", "micro-batch", "step")),
        ({"gather": "step", "reshard_after_forward": True}, 2, {}, "weights.reshard_after_forward", ("whole",)),
        ({"gathers": "layer"}, 2, {}, "weights.gathers", ("gather",)),
        ({}, 1, {}, "weights", ("nobody else", "optimizer: {offload: true}")),
        ({}, 2, {"tp": 2}, "weights", ("nobody else", "dp_split")),
        ({"shard": [1, 0, 3, 0]}, 4, {"tp": 2}, "weights.shard", ("TP rank 1",)),
        ({"shard": [1, 0, 3]}, 3, {"ranks": [[0, 1], [2]]}, "weights.shard", ("unlike TP",)),
        ({}, 2, {"dtype": "fp8"}, "weights", ("fp8",)),
    ):  # fmt: skip
        with refused(f"{first}.{field}", *words):
            _one(weights, ranks, **more)
    with refused(f"{first}.optimizer", "weights: {gather: step}"):
        _plan(stage([0, 1], ENDS, optimizer={"shard_weights": True}))
    with refused(f"{first}.weights", "DoRA", "no weights key"):
        _plan(stage([0, 1], ENDS, weights={}), spec=adapted(SPEC, Lora(2, 4.0, dora=True)))


@pytest.mark.parametrize("shard", [[1, 1], [3, 1], [1, 0]])
def test_owners_keep_what_their_shares_say(shard: list[int]) -> None:
    spec = load_model("llama3-8b")
    made = _plan(stage([0, 1], [0, 16], weights={"shard": shard}), stage([2], [16, 32]), spec=spec)
    buckets = make_buckets(made, spec)
    divided = [b for b in buckets if b.weights is not None]
    assert {b.segment for b in divided} == {"embed", *range(16)} and all(b.ranks == (0, 1) for b in divided)
    owned = sum(b.counts()[1] for b in divided)
    for got, share in zip(owned / owned.sum(), shard, strict=True):
        assert abs(got - share / sum(shard)) < 1e-3
    # They travel inside forward and backward: the step's end has nothing of them, and that is a valid step.
    assert sync_actions(buckets, 0) == ((), ()) and CompiledPlan(made, spec).schedules()


def test_every_stage_divides_what_its_pipeline_holds_once() -> None:
    """Three pipelines, cut unlike, of unlike TP, one of them whole: what a rank keeps is what its shares say, and of it
    the rank owns a part; every element has one owner; an embedding that two stages of a pipeline hold stays whole."""
    spec = replace(SPEC, tied=True)
    first = [stage([0, 1, 2], [0, 4], weights={"shard": [1, 3, 0]}), stage([3], [4, 6])]
    second = [stage([4, 5, 6, 7], [0, 6], tp=2, weights={"shard": [1, 1, 3, 2]})]
    pipelines = [pipe(6, 1, *first), pipe(2, 1, *second), pipe(1, 1, stage([8], [0, 6]))]
    compiled = CompiledPlan(plan_from_dict(plan(pipelines, 64), spec), spec)
    kept: dict[str, dict[int, tuple[Box, ...]]] = {name: {} for name in compiled.holders}
    for bucket in compiled.divided:
        assert bucket.ranks in ((0, 1, 2), (4, 5, 6, 7)) and bucket.onward is not None
        assert {compiled.buckets[bucket.onward].names} == {bucket.names}
        for name, owners in bucket.owners.items():
            kept[name] |= owners.boxes
    names = {name for b in compiled.divided if b.ranks[0] == 0 for name in b.names}
    assert names == {t.name for t in stage_tensors(spec, range(4), False, False)}
    final, counts = [b for b in compiled.buckets if b.onward is None], np.zeros(9)
    for bucket in final:
        for name, owners in bucket.owners.items():
            covered = np.zeros(owners.shape, int)
            for rank, box in owners.items():
                covered[box.slices()] += 1
                assert any(x.contains(box) for x in kept[name].get(rank, compiled.holders[name].of(rank)))
            assert (covered == 1).all(), name
    for bucket in compiled.divided:
        counts[list(bucket.ranks)] += bucket.counts()[1]
    for ranks, shares in (([0, 1, 2], [1, 3, 0]), ([4, 6], [1, 3]), ([5, 7], [1, 2])):
        assert np.allclose(counts[ranks] / counts[ranks].sum(), np.array(shares) / sum(shares), atol=0.02)
    assert compiled.schedules()  # ranks meet in the sums of kept rows in one order


def test_a_frozen_base_is_divided_and_adapters_stay_whole() -> None:
    """Weights in 8 or 4 bits lie beside others of their layer, and are owned alike; blocks of 4 bits with scales."""
    for dtype in (None, "int8", "nf4"):
        spec = adapted(load_model("llama3-8b"), Lora(8, 16.0, base_dtype=dtype))
        made = _plan(stage([0, 1], [0, 16], weights={"shard": [3, 1]}), stage([2], [16, 32]), spec=spec)
        compiled = CompiledPlan(made, spec)
        assert all(b.weights is None and b.trained for b in compiled.buckets) and compiled.divided == compiled.frozen
        frozen = {t.name: t for t in stage_tensors(spec, range(16), True, False) if not t.trained}
        assert {name for b in compiled.frozen for name in b.names} == frozen.keys()
        for bucket in compiled.frozen:
            assert not bucket.trained and {frozen[name].layer for name in bucket.names} == {bucket.segment}
            assert {frozen[name].int8 or frozen[name].nf4 for name in bucket.names} == {bucket.in_bytes}
            for name, layout in bucket.holders.items():
                assert layout.counts()[0] == gathered_bytes(frozen[name], 1)
        owned = sum(b.counts()[1] for b in compiled.frozen)
        assert abs(owned[0] / owned.sum() - 0.75) < 1e-3 and compiled.schedules()
    assert not CompiledPlan(_one({}), SPEC).frozen


def test_matrices_cut_inside_a_block_of_4_bits_stay_whole() -> None:
    """Those with 192 columns over two ranks; 128 are cut between blocks, and so are rows anywhere."""
    config = LLAMA | {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2}
    spec = adapted(from_hf_config(config), Lora(2, 4.0, base_dtype="nf4"))
    for ranks, whole in (([[0, 1], [2, 3]], {"down_proj"}), ([[0, 1], [2]], {"down_proj"}), ([[0], [1]], set())):
        made = _plan({"ranks": ranks, "layers": [0, spec.num_layers], "weights": {}}, spec=spec)
        names = {name for bucket in CompiledPlan(made, spec).frozen for name in bucket.names}
        assert {t.name.split(".")[-2] for t in logical_tensors(spec) if t.nf4 and t.name not in names} == whole


def test_megatron_flags_become_divided_plans(tmp_path: Path) -> None:
    """The replicas of one pipeline; with nobody to divide with, the plain plan. Beside a plan they are refused."""
    base = ["--model", "tiny", "--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "16"]
    base += ["--dry-run", "--mock-data", "--train-iters", "1", "--lr", "1e-3"]
    strategy = ["--use-megatron-fsdp", "--data-parallel-sharding-strategy"]
    for words, gather, reshard in (
        (["--use-torch-fsdp2"], "layer", True),
        (["--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward"], "layer", False),
        ([*strategy, "optim_grads_params"], "layer", True),
        ([*strategy, "optim_grads", "--fsdp-double-buffer"], "step", False),
        ([*strategy, "optim"], None, None), ([*strategy, "no_shard"], None, None), (strategy[:1], None, None),
        (["--data-parallel-sharding-strategy", "optim_grads_params"], None, None),
    ):  # fmt: skip
        for degrees, tp, pp in ([], 1, 1), (["--tensor-model-parallel-size", "2"], 2, 1), (PIPELINED, 1, 2):
            made = configure([*base, *words, *degrees], {"WORLD_SIZE": "4"}).plan
            replicas = 4 // tp // pp
            expected = None if gather is None else WeightSharding((1,) * (tp * replicas), gather, bool(reshard))
            assert {stage.weights for stage in made.stages} == {expected}, words
            assert len(made.pipelines) == (replicas if gather is None else 1) and made.global_batch_size == 16
            assert all(stage.dp_split == (2,) * (1 if gather is None else replicas) for stage in made.stages)
        alone = configure([*base, *words], {"WORLD_SIZE": "1"}).plan
        assert alone == configure(base, {"WORLD_SIZE": "1"}).plan
    (tmp_path / "plan.yaml").write_text(dump_yaml(_one({})))
    file = ["--plan", str(tmp_path / "plan.yaml"), "--model", "tiny", "--dry-run", "--mock-data"]
    outer, dtype = "--outer-dp-sharding-strategy", "--megatron-fsdp-grad-comm-dtype"
    for words, flag, said in (
        ([*file, "--use-torch-fsdp2"], "--use-torch-fsdp2", "the plan file says this already"),
        ([*file, "--compile"], "pipelines[0].stages[0].weights", "compiled layers"),
        ([*base, "--use-torch-fsdp2", "--use-megatron-fsdp"], "--use-torch-fsdp2", "one of the two"),
        ([*base, "--torch-fsdp2-no-reshard-after-forward"], "--torch-fsdp2-no-reshard-after-forward", "without"),
        ([*base, "--use-torch-fsdp2", outer, "optim"], outer, "no_shard"),
        ([*base, *strategy, "optim", dtype, "bf16"], dtype, "fp32"),
        ([*base, *strategy, "all"], "--data-parallel-sharding-strategy", "optim_grads_params"),
    ):  # fmt: skip
        with refused(flag, said):
            configure(words, {"WORLD_SIZE": "2"})


def test_what_a_run_cannot_divide_beside() -> None:
    divided = _one({})
    for options, said in (
        (RuntimeOptions(compile_backend="inductor"), "--compile"),
        (RuntimeOptions(graphs_after=3), "graphs"),
        (RuntimeOptions(fp8=Fp8("e4m3", "tensorwise")), "fp8"),
    ):
        with refused("pipelines[0].stages[0].weights", said):
            stages_fit(options, divided)
    stages_fit(RuntimeOptions(), divided)
