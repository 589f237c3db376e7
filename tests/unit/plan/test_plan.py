"""Plans: spellings, fingerprints, shares, conversion from flags, pictures."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.run_pictures import plan_picture
from hetero_megatron.plans import (
    Plan,
    Recompute,
    activation_layout,
    dump_yaml,
    format_plan,
    idle_ranks,
    load_plan,
    locate,
    micro_batch_sizes,
    pipeline_samples,
    pipeline_shares,
    plan_from_dict,
    to_dict,
    unit_sequences,
    validate,
)
from hetero_megatron.plans.importers.flagscale import FlagScaleParallel, from_flagscale
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from hetero_megatron.plans.schema import expand
from hetero_megatron.plans.shares import nested_zigzag
from hetero_megatron.spec import load_model
from hetero_megatron.utils.yaml_document import from_data, parse_document
from tests.support.paths import ROOT
from tests.support.selection import each
from tests.unit.plan.test_bad_input import small_spec


def spelled(stages: list[dict[str, Any]], size: int = 4, count: int = 2, **more: Any) -> dict[str, Any]:
    pipeline = {"micro_batch_size": size, "num_micro_batches": count, "stages": stages}
    return {"seq_length": 32, "global_batch_size": size * count, "pipelines": [pipeline], **more}


def random_plan(seed: int) -> dict[str, Any]:
    """A spelled plan over 1 to 3 pipelines for the 6-layer test model."""
    rng = random.Random(seed)
    pipelines: list[dict[str, Any]] = []
    free, total = 0, 0
    for _ in range(rng.randint(1, 3)):
        size, count = rng.choice([1, 2, 3, 4, 6]), rng.randint(1, 5)
        cuts = sorted(rng.sample(range(1, 6), rng.randint(0, 3)))
        stages: list[dict[str, Any]] = []
        for a, b in zip([0, *cuts], [*cuts, 6]):
            tp, dp = rng.randint(1, 4), rng.choice([d for d in (1, 2, 3) if d <= size])
            ranks = list(range(free, free + tp * dp))
            free += tp * dp
            rng.shuffle(ranks)
            stage: dict[str, Any] = {"ranks": ranks, "layers": [a, b], "tp": tp}
            marks = sorted(rng.sample(range(1, size), dp - 1))
            stage["dp_split"] = [hi - lo for lo, hi in zip([0, *marks], [*marks, size])]
            if rng.random() < 0.4:
                stage["tp_split"] = [rng.randint(1, 3) for _ in range(tp)]
            kinds = ["none", "selective", "elementwise", "full", {"first": rng.randint(0, b - a)}]
            stage["recompute"] = rng.choice(kinds)
            stages.append(stage)
        total += size * count
        pipelines.append({"micro_batch_size": size, "num_micro_batches": count, "stages": stages})
    return {
        "version": 1,
        "seq_length": rng.choice([16, 31]),
        "global_batch_size": total,
        "schedule": rng.choice(["gpipe", "1f1b"]),
        "pipelines": pipelines,
    }


@each("seed", range(60))
def test_random_plans(seed: int, tmp_path: Path) -> None:
    spec = small_spec()
    plan = plan_from_dict(random_plan(seed), spec)
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(plan))
    again = load_plan(path, spec)
    assert again == plan and again.fingerprint() == plan.fingerprint()
    assert plan_from_dict(to_dict(plan), spec) == plan
    check_shares(plan)
    assert all(len(line) <= 110 for line in format_plan(plan, spec).splitlines())
    for rank in plan.ranks:
        place = locate(plan, rank)
        unit = plan.pipelines[place.pipeline].stages[place.stage].units[place.unit]
        assert unit.ranks[place.tp_rank] == rank


def check_shares(plan: Plan) -> None:
    nominal = tuple(p.micro_batch_size * p.num_micro_batches for p in plan.pipelines)
    assert pipeline_shares(plan, plan.global_batch_size) == nominal
    for batch in (0, 1, 5, plan.global_batch_size * 3 + 1):
        shares = pipeline_shares(plan, batch)
        assert sum(shares) == batch
        blocks = pipeline_samples(plan, batch)
        assert [b - a for a, b in blocks] == list(shares) and blocks[-1][1] == batch
        for p, (pipeline, share) in enumerate(zip(plan.pipelines, shares)):
            sizes = micro_batch_sizes(pipeline, share)
            assert sum(sizes) == share and all(size == pipeline.micro_batch_size for size in sizes[:-1])
            for size in set(sizes):
                check_activations(plan, p, size)


def check_activations(plan: Plan, pipeline: int, size: int) -> None:
    """Each (sequence, token) is held by exactly one rank, evenly within a TP group."""
    for s, stage in enumerate(plan.pipelines[pipeline].stages):
        layout = activation_layout(plan, pipeline, s, size, hidden=8)
        count = np.zeros(layout.shape, dtype=int)
        for _, box in layout.items():
            count[box.slices()] += 1
        assert (count == 1).all()
        assert set(layout.ranks) == set(stage.ranks)
        for unit, (a, b) in zip(stage.units, unit_sequences(stage, size)):
            held = [layout.elements(rank) for rank in unit.ranks]
            assert max(held) - min(held) <= (b - a) * 8


EQUAL = {
    "ranges and lists": ({"ranks": "0-3", "tp": 4}, {"ranks": [0, 1, 2, 3], "tp": 4}),
    "mixed lists": ({"ranks": "0-1,2-3", "tp": 4}, {"ranks": [0, "1-3"], "tp": 4}),
    "even dp": ({"ranks": "0-3"}, {"ranks": "0-3", "tp": 1, "dp_split": [1, 1, 1, 1]}),
    "tp from dp_split": ({"ranks": "0-3", "dp_split": [2, 2]}, {"ranks": "0-3", "tp": 2}),
    "nested": ({"ranks": [[0, 1], [2, 3]]}, {"ranks": "0-3", "tp": 2}),
    "tp from tp_split": ({"ranks": "0-3", "tp_split": [2, 1]}, {"ranks": "0-3", "tp": 2, "tp_split": [4, 2]}),
    "split per group": (
        {"ranks": "0-3", "tp": 2, "tp_split": [[2, 1], [2, 1]]},
        {"ranks": "0-3", "tp_split": [2, 1]},
    ),
    "even split": ({"ranks": "0-1", "tp": 2, "tp_split": [3, 3]}, {"ranks": "0-1", "tp": 2}),
    "layers": ({"ranks": 0, "layers": [[0, 6]]}, {"ranks": [0]}),
    "ends": ({"ranks": 0, "embed": True, "head": True}, {"ranks": 0}),
    "first 0": ({"ranks": 0, "recompute": {"first": 0}}, {"ranks": 0, "recompute": "none"}),
    "first all": ({"ranks": 0, "recompute": {"first": 6}}, {"ranks": 0, "recompute": "full"}),
    "defaults": ({"ranks": 0, "optimizer": {"offload": False}, "kernels": {}}, {"ranks": 0}),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_plans_have_equal_fingerprints(name: str) -> None:
    spec = small_spec()
    one, two = (plan_from_dict(spelled([{"layers": [0, 6], **stage}]), spec) for stage in EQUAL[name])
    assert one == two and one.fingerprint() == two.fingerprint()


def test_fingerprints_tell_plans_apart() -> None:
    spec = small_spec()
    plans = [plan_from_dict(random_plan(seed), spec) for seed in range(60)]
    assert len({plan.fingerprint() for plan in plans}) == len(set(plans)) == 60
    assert all(len(plan.fingerprint()) == 16 for plan in plans)


def test_unequal_tp_inside_a_stage_round_trips() -> None:
    spec = small_spec()
    stage = {"ranks": [[0, 1, 2], [3]], "layers": [0, 6], "dp_split": [3, 1], "tp_split": [[2, 1, 1], [1]]}
    plan = plan_from_dict(spelled([stage]), spec)
    assert [unit.tp for unit in plan.pipelines[0].stages[0].units] == [3, 1]
    assert plan_from_dict(to_dict(plan), spec) == plan
    check_shares(plan)


def test_repeat() -> None:
    spec = small_spec()
    stages = [{"ranks": "0-1", "layers": [0, 4], "tp": 2}, {"ranks": 2, "layers": [4, 6]}]
    data = spelled(stages, global_batch_size=24)
    data["pipelines"][0]["repeat"] = 3
    plan = plan_from_dict(data, spec)
    assert [p.ranks for p in plan.pipelines] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert to_dict(plan)["pipelines"][0]["repeat"] == 3
    assert plan_from_dict(to_dict(plan), spec) == plan


def test_errors_after_repeat_name_the_pipeline_as_spelled(tmp_path: Path) -> None:
    first = "{micro_batch_size: 1, num_micro_batches: 1, repeat: 3, stages: [{ranks: 0, layers: [0, 6]}]}"
    second = "{micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 3, layers: [0, 5]}]}"
    path = tmp_path / "plan.yaml"
    path.write_text(f"seq_length: 8\nglobal_batch_size: 4\npipelines:\n  - {first}\n  - {second}\n")
    with pytest.raises(UserError) as caught:
        load_plan(path, small_spec())
    assert caught.value.field == "pipelines[1].stages[0].layers" and f"{path}:5:" in str(caught.value)


def test_stages_without_layers() -> None:
    stages: list[dict[str, Any]] = [
        {"ranks": 0, "layers": [], "recompute": "full"},
        {"ranks": 1, "layers": [0, 6]},
        {"ranks": 2, "layers": []},
    ]
    plan = plan_from_dict(spelled(stages), small_spec())
    embed, middle, head = plan.pipelines[0].stages
    assert (embed.embed, middle.embed, head.head, middle.head) == (True, False, True, False)
    assert embed.layer_indices() == () and embed.recompute == Recompute()


def test_the_demo_plan_fits_the_tiny_preset() -> None:
    spec = load_model("tiny")
    plan = load_plan(ROOT / "examples" / "plans" / "demo.yaml", spec)
    assert plan.world_size == 4
    picture = format_plan(plan, spec, chips=["big", "big", "small", "small"])
    assert "big" in picture and "small" in picture and "75 %" in picture


@pytest.mark.parametrize(
    ("stages", "shown"),
    [
        ([{"ranks": [1, 0], "layers": [0, 6], "tp": 2}], "ranks 1,0 "),
        ([{"ranks": [3, 1, 2, 0], "layers": [0, 6], "tp": 2, "dp_split": [1, 3]}], "ranks 3,1-2,0 "),
        ([{"ranks": [2, 1], "layers": [0, 3], "tp": 2}, {"ranks": [0], "layers": [3, 6]}], "ranks 2,1 "),
        ([{"ranks": [*range(23, -1, -1)], "layers": [0, 6], "tp": 8, "dp_split": [1, 1, 2]}],
         "24 ranks 23,22,21,20,19…"),
    ],
)  # fmt: skip
def test_pictures_show_ranks_in_the_order_listed(stages: list[dict[str, Any]], shown: str) -> None:
    spec = small_spec(heads=8)
    plan = plan_from_dict(spelled(stages), spec)
    assert shown in format_plan(plan, spec)
    assert shown.strip(" …").rpartition("ranks ")[2] in plan_picture(
        {"plan": to_dict(plan), "model": {"num_layers": 6}, "chips": {str(r): "A" for r in plan.ranks}}
    )


def test_a_repeated_pipeline_keeps_the_order_of_its_ranks() -> None:
    written = spelled([{"ranks": [2, 0, 1], "layers": [0, 6], "tp": 3}], 1, 2, global_batch_size=4)
    written["pipelines"][0]["repeat"] = 2
    plan = plan_from_dict(written, small_spec())
    assert [p.ranks for p in plan.pipelines] == [(2, 0, 1), (5, 3, 4)]
    assert "repeat: 2" in dump_yaml(plan)


# Context groups.


def context_stage(**more: Any) -> dict[str, Any]:
    groups = [
        {"ranks": [0, 1], "tokens": [9, 7], "heads": [3, 1]},
        {"ranks": [2, 3, 4], "tokens": [7, 9, 0], "heads": [2, 0, 2]},
    ]
    return {"ranks": "0-4", "layers": [0, 6], "context": groups, **more}


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_context_groups_expand_to_units(order: str) -> None:
    spec = small_spec()
    plan, _ = expand(from_data(spelled([context_stage(order=order)])), spec.num_heads)
    units = plan.pipelines[0].stages[0].units
    assert [unit.num_tokens for unit in units] == [9, 7, 7, 9, 0]
    assert [unit.heads for unit in units] == [(0, 3), (3, 4), (0, 2), (2, 2), (2, 4)]
    assert [unit.group for unit in units] == [0, 0, 1, 1, 1]
    check_activations(plan, 0, 4)
    again, _ = expand(from_data(to_dict(plan)), spec.num_heads)
    assert again == plan and again.fingerprint() == plan.fingerprint()
    validate(plan, spec)


def test_the_example_of_the_design_expands() -> None:
    text = """
    version: 1
    seq_length: 4096
    global_batch_size: 256
    schedule: 1f1b
    pipelines:
      - micro_batch_size: 1
        num_micro_batches: 160
        repeat: 1
        stages:
          - {ranks: "0-3", layers: [0, 20],  tp: 4, recompute: none}
          - {ranks: [8,9], layers: [20, 32], tp: 2, recompute: full}
      - micro_batch_size: 1
        num_micro_batches: 96
        stages:
          - ranks: [4,5,6,7,10,11]
            layers: [0, 32]
            context:
              - {ranks: [4,5,6,7], tokens: [1024,768,768,512], heads: [12,8,8,4]}
              - {ranks: [10,11],   tokens: [640,384],          heads: [20,12]}
    """
    plan, source = expand(parse_document(text, "design.yaml"), 32)
    spec = small_spec(32, 4096, heads=32)
    validate(plan, spec, source=source)
    assert plan.world_size == 12 and expand(from_data(to_dict(plan)), 32)[0] == plan


def test_context_members_may_be_tp_groups() -> None:
    groups = [{"ranks": [[0, 1], [2, 3]], "tokens": [20, 12], "heads": [3, 1]}]
    stage = {"ranks": "0-3", "layers": [0, 6], "context": groups, "kv": {"transport": "ring", "block": 4}}
    plan, _ = expand(from_data(spelled([stage])), 4)
    assert [unit.ranks for unit in plan.pipelines[0].stages[0].units] == [(0, 1), (2, 3)]
    check_activations(plan, 0, 3)
    assert expand(from_data(to_dict(plan)), 4)[0] == plan


def test_zigzag_is_balanced_under_a_causal_mask() -> None:
    (rows,) = nested_zigzag([[8, 8, 8, 8]])
    assert rows[0] == ((0, 4), (28, 32)) and rows[3] == ((12, 20),)
    work = [sum(sum(range(a + 1, b + 1)) for a, b in row) for row in rows]
    assert max(work) == min(work)


# From flags.


def test_megatron_ranks_run_through_tp_then_dp_then_pp() -> None:
    flags = MegatronParallel(
        world_size=8,
        seq_length=32,
        micro_batch_size=2,
        global_batch_size=8,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    plan = from_megatron(flags, small_spec())
    assert [[s.ranks for s in p.stages] for p in plan.pipelines] == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]
    assert [(p.micro_batch_size, p.num_micro_batches) for p in plan.pipelines] == [(2, 2), (2, 2)]
    assert plan_from_dict(to_dict(plan), small_spec()) == plan

    other = from_megatron(replace(flags, use_tp_pp_dp_mapping=True), small_spec())
    assert [p.ranks for p in other.pipelines] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    written = spelled(
        [{"ranks": "0-1", "layers": [0, 3], "tp": 2}, {"ranks": "2-3", "layers": [3, 6], "tp": 2}], 2, 2
    )
    written["pipelines"][0]["repeat"], written["global_batch_size"] = 2, 8
    assert plan_from_dict(written, small_spec()).fingerprint() == other.fingerprint()


def counts(plan: Plan) -> list[int]:
    return [stage.num_layers for stage in plan.pipelines[0].stages]


@pytest.mark.parametrize(
    ("num_layers", "pp", "more", "expected"),
    [
        (30, 4, {}, [8, 8, 7, 7]),
        (30, 4, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split":
        True}, [7, 8, 8, 7]), (31, 4, {"account_for_loss_in_pipeline_split": True}, [8, 8, 8, 7]),
        (30, 4, {"decoder_first_pipeline_num_layers": 5}, [5, 9, 8, 8]),
        (30, 4, {"decoder_first_pipeline_num_layers": 5, "decoder_last_pipeline_num_layers": 7}, [5, 9,
        9, 7]), (6, 3, {"decoder_last_pipeline_num_layers": 0}, [3, 3, 0]),
        (6, 3, {"pipeline_model_parallel_layout": "Et*3|tt|tL"}, [3, 2, 1]),
        (61, 31, {"pipeline_model_parallel_layout": "Et*3|(tt|)*29,L"}, [3, *[2] * 29, 0]),
        (6, 3, {"pipeline_model_parallel_layout": "E|(t,t)*3|L"}, [0, 6, 0]),
        (6, 2, {"pipeline_model_parallel_layout": "E((t)*2t|)*1 t*3 L"}, [3, 3]),
    ],
)  # fmt: skip
def test_megatron_layers(num_layers: int, pp: int, more: dict[str, Any], expected: list[int]) -> None:
    flags = MegatronParallel(world_size=pp, seq_length=32, pipeline_model_parallel_size=pp, **more)
    plan = from_megatron(flags, small_spec(num_layers))
    assert counts(plan) == expected
    assert plan.pipelines[0].stages[0].embed and plan.pipelines[0].stages[-1].head


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [Recompute(), Recompute()]),
        ({"recompute_activations": True}, [Recompute("selective")] * 2),
        ({"recompute_granularity": "selective"}, [Recompute("selective")] * 2),
        ({"recompute_activations": True, "recompute_modules": ["core_attn"]}, [Recompute("selective")] * 2),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp_act", "layernorm", "moe_act"]},
            [Recompute("elementwise")] * 2,
        ),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        [Recompute("full")] * 2), (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
            [Recompute("first", 2), Recompute("full")],
        ),
    ],
)  # fmt: skip
def test_megatron_recompute(more: dict[str, Any], expected: list[Recompute]) -> None:
    flags = MegatronParallel(
        world_size=2,
        seq_length=32,
        pipeline_model_parallel_size=2,
        decoder_first_pipeline_num_layers=4,
        **more,
    )
    assert [stage.recompute for stage in from_megatron(flags, small_spec()).pipelines[0].stages] == expected


def test_flagscale_aquila() -> None:
    flags = FlagScaleParallel(
        seq_length=2048,
        hetero_process_meshes=[2, 1, 1, 1, 1, 4, 1, 1, 1, 1, 2, 1, 1, 1, 1],
        hetero_pipeline_layer_split=[6, 2, 4],
        hetero_device_types=["A800", "A800", "A800"],
        global_batch_size=32,
        world_size=8,
    )
    plan = from_flagscale(flags, small_spec(12, 2048, heads=32))
    assert [stage.ranks for stage in plan.pipelines[0].stages] == [(0, 1), (2, 3, 4, 5), (6, 7)]
    assert counts(plan) == [6, 2, 4] and plan.pipelines[0].num_micro_batches == 32
    assert {stage.chip for stage in plan.pipelines[0].stages} == {"A800"}


def test_flagscale_llama3_8b() -> None:
    """Data parallel 4 before 2: two pipelines, the first stages of which have two inner replicas."""
    flags = FlagScaleParallel(
        seq_length=8192,
        hetero_process_meshes=[2, 1, 1, 4, 1, 4, 1, 1, 2, 1],
        hetero_pipeline_layer_split=[18, 14],
        hetero_device_types=["A800", "A100"],
        global_batch_size=2048,
        recompute_granularity_per_stage_micro_batch=[[1, 512, 1], [1, 500, 0, 12, 0]],
        recompute_method_per_stage_micro_batch=[[2, 512, 1]],
        recompute_num_layers_per_stage_micro_batch=[[2, 512, 5]],
    )
    plan = from_flagscale(flags, small_spec(32, 8192, heads=32))
    assert len(plan.pipelines) == 2
    assert [[stage.ranks for stage in p.stages] for p in plan.pipelines] == [
        [(0, 1, 2, 3), (8, 9, 10, 11)],
        [(4, 5, 6, 7), (12, 13, 14, 15)],
    ]
    first, second = plan.pipelines[0].stages
    assert (first.dp_split, second.dp_split) == ((1, 1), (2,))
    assert (first.recompute, second.recompute) == (Recompute("first", 5), Recompute())
    assert (plan.pipelines[0].micro_batch_size, plan.pipelines[0].num_micro_batches) == (2, 512)


def test_flagscale_deepseek_is_refused_by_name() -> None:
    flags = FlagScaleParallel(
        seq_length=2048,
        hetero_process_meshes=[1, 1, 2, 4, 1, 1, 1, 2, 2, 1, 1, 1, 2, 2, 1],
        hetero_pipeline_layer_split=[11, 6, 7],
    )
    with pytest.raises(UserError, match="expert parallelism 2"):
        from_flagscale(flags, small_spec(24, 2048))


def test_flagscale_qwen3_10b_equals_the_megatron_plan() -> None:
    meshes = [1, 1, 1, 8, 1, 1, 1, 1, 8, 1]
    flags = FlagScaleParallel(4096, meshes, [28, 28], global_batch_size=64)
    spec = small_spec(56, 4096)
    uniform = MegatronParallel(16, 4096, 1, 64, pipeline_model_parallel_size=2)
    assert from_flagscale(flags, spec).fingerprint() == from_megatron(uniform, spec).fingerprint()


# Pictures, speed, clusters.


def big_plan() -> Plan:
    flags = MegatronParallel(
        world_size=1024,
        seq_length=256,
        global_batch_size=512,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=8,
    )
    return from_megatron(flags, small_spec(64, heads=32))


def test_the_picture_of_1024_ranks_is_readable() -> None:
    plan = big_plan()
    picture = format_plan(plan, small_spec(64, heads=32), chips=["A"] * 512 + ["B"] * 512)
    lines = picture.splitlines()
    assert len(lines) < 40 and max(map(len, lines)) <= 110
    assert "ranks 0-127" in picture and "16 alike" in picture


def test_1024_ranks_round_trip(tmp_path: Path) -> None:
    plan, spec = big_plan(), small_spec(64, heads=32)
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(plan))
    assert load_plan(path, spec) == plan


def test_plans_load_without_torch() -> None:
    code = (
        "import sys, hetero_megatron.plans as p, hetero_megatron.spec as s\n"
        "p.load_plan('examples/plans/demo.yaml', s.load_model('tiny'))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_chips_of_a_cluster_may_be_idle_and_leave_gaps() -> None:
    spec = load_model("tiny")
    cluster = cluster_from_dict(
        {"nodes": [{"name": "n", "count": 4, "chip": "c"}], "chips": {"c": {"memory": "1 GiB"}},
         "links": {"inter_node": {"bandwidth": "1 GB/s"}}}
    )  # fmt: skip
    stages = [{"ranks": [0], "layers": [0, 3]}, {"ranks": [2], "layers": [3, 6]}]
    data = {"version": 1, "seq_length": 64, "global_batch_size": 2, "schedule": "1f1b",
            "pipelines": [{"micro_batch_size": 1, "num_micro_batches": 2, "stages": stages}]}  # fmt: skip
    plan = plan_from_dict(data, spec, cluster)
    assert plan.ranks == (0, 2) and idle_ranks(plan, cluster) == (1, 3)
    with pytest.raises(UserError, match="rank 1 is not used"):
        plan_from_dict(data, spec)
