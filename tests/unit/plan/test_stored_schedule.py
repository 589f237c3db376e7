"""Plans that store the schedules of their pipelines."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan, dump_yaml, load_plan, plan_from_dict, to_dict
from hetero_megatron.plans.program import pipeline_schedule, splits_backward
from hetero_megatron.schedule import in_flight, simulate
from hetero_megatron.schedule.simulate import Costs
from hetero_megatron.schedule.stored import pack, schedule_to_dict, unpack
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.random_plans import adapt

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return from_hf_config(LLAMA, where="test")


def plan_data() -> dict[str, Any]:
    stages = [{"ranks": s, "layers": [s, s + 1] if s < 2 else [2 * s - 2, 2 * s]} for s in range(3)]
    pipeline = {"micro_batch_size": 1, "num_micro_batches": 6, "stages": stages}
    data = {"version": 1, "seq_length": 16, "global_batch_size": 6, "schedule": "adaptive", "pipelines": [pipeline]}
    adapt(random.Random(3), data, 4)
    return data


@pytest.fixture(scope="module")
def plan(spec: ModelSpec) -> Plan:
    found = plan_from_dict(plan_data(), spec)
    assert found.schedule == "adaptive" and found.pipelines[0].orders
    return found


def test_the_file_keeps_the_schedule(plan: Plan, spec: ModelSpec, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(plan))
    again = load_plan(path, spec)
    assert again == plan and again.fingerprint() == plan.fingerprint()
    assert plan_from_dict(to_dict(plan), spec) == plan
    (pipeline,) = plan.pipelines
    timeline = simulate(pipeline_schedule(plan, pipeline), Costs([1.0] * 3, [2.0] * 3))
    assert timeline.schedule.name == "adaptive" and timeline.step_seconds > 0


def test_a_long_schedule_is_one_word(spec: ModelSpec, tmp_path: Path) -> None:
    """In the file; its orders, and so the fingerprint, are those of the letters."""
    orders = tuple(" ".join("FB" if (i * s) % 3 else f"F F{'B' * 2}" for i in range(60)) for s in range(1, 5))
    word = pack(orders)
    assert unpack(word, sum(map(len, orders)) + 4, "stages") == list(orders)
    assert schedule_to_dict("adaptive", orders, 60, "x")["stages"] == word and len(word) < sum(map(len, orders)) / 4
    data = plan_data()
    stored = data["pipelines"][0]["schedule"]
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    letters = load_plan(path, spec)
    stored |= {"version": 2, "stages": pack(stored["stages"])}
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    assert load_plan(path, spec).fingerprint() == letters.fingerprint()


def test_the_schedule_is_part_of_the_plan(plan: Plan) -> None:
    other = replace(plan, schedule="1f1b", pipelines=(replace(plan.pipelines[0], orders=()),))
    assert other.fingerprint() != plan.fingerprint()


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"version": 3}, "version", "another version"),
        ({"version": True}, "version", "another version"),
        ({"version": 2}, "stages", "zlib:"),
        ({"version": 2, "stages": "zlib:AAAA"}, "stages", "unpacked"),
        ({"version": 2, "stages": "zlib:ü"}, "stages", "unpacked"),
        ({"version": 2, "stages": pack(["F*6 B*6"] * 3)[:-6]}, "stages", "unpacked"),
        ({"version": 2, "stages": pack(["F*6 B*6" + " " * 10**7] * 3)}, "stages", "unpacked"),  # 30 MB of blanks
        ({"version": 2, "stages": pack(["F*6 B*6"] * 2)}, "stages", "another plan"),
        ({"made_for": "0" * 12}, "made_for", "another plan"),
        ({"num_micro_batches": 5}, "num_micro_batches", "another plan"),
        ({"stages": ["FFFFFFBBBBBB"]}, "stages", "another plan"),
        ({"stages": ["B*6 F*6", "F*6 B*6", "F*6 B*6"]}, "stages[0]", "before its forward"),
        ({"stages": ["FB*6", "F*6 B*6", "F*6 B*6"]}, "", "deadlock"),
        ({"stages": "F*6"}, "stages", "list"),
        ({"stages": ["F*6 B*5", "F*6 B*6", "F*6 B*6"]}, "stages[0]", "missing"),
        ({"colour": 1}, "colour", "unknown key"),
    ],
)
def test_a_stored_schedule_that_cannot_run_is_refused(
    change: dict[str, Any], field: str, says: str, spec: ModelSpec, tmp_path: Path
) -> None:
    data = plan_data()
    data["pipelines"][0]["schedule"] |= change
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    with pytest.raises(UserError) as caught:
        load_plan(path, spec)
    assert str(path) in str(caught.value) and says in str(caught.value)
    assert (caught.value.field or "").endswith(field)


def test_a_schedule_that_the_plan_does_not_ask_for_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(UserError, match=r"the plan says 1f1b"):
        plan_from_dict({**plan_data(), "schedule": "1f1b"}, spec)


def test_another_number_of_micro_batches_is_refused(plan: Plan) -> None:
    with pytest.raises(UserError, match="stored schedule is for 6 micro-batches"):
        pipeline_schedule(plan, plan.pipelines[0], 4)


def chunked_data() -> dict[str, Any]:
    stages = [{"ranks": s, "layers": [[s, s + 1], [s + 2, s + 3]]} for s in range(2)]
    pipeline = {"micro_batch_size": 1, "num_micro_batches": 5, "stages": stages}
    data = {"version": 1, "seq_length": 16, "global_batch_size": 5, "schedule": "adaptive", "pipelines": [pipeline]}
    adapt(random.Random(1), data, 4)
    return data


def test_the_file_keeps_a_schedule_over_chunks(spec: ModelSpec, tmp_path: Path) -> None:
    plan = plan_from_dict(chunked_data(), spec)
    assert plan.schedule == "adaptive" and any("F1" in row for row in plan.pipelines[0].orders)
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(plan))
    assert load_plan(path, spec) == plan
    schedule = pipeline_schedule(plan, plan.pipelines[0])
    assert schedule.chunks == 2
    assert simulate(schedule, Costs([1.0] * 2, [2.0] * 2)).step_seconds >= 15
    without = replace(plan, pipelines=(replace(plan.pipelines[0], orders=()),))
    assert pipeline_schedule(without, without.pipelines[0]).name == "interleaved"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("F*5 F1*5 B1*5 B*4 B2", "chunk that the stage does not have"),
        ("F*5 B*5 F1*5 B1*5", "deadlock"),
        ("F*5 F1*4 B1*5 B*5", "B1 is missing|comes before its forward"),
        ("F*5 F1*5 B1*5 B*4", "missing"),
        ("F*5 F1*5 B1*5 B*5 F1", "one forward more|more than"),
        ("F*5 F01*5", "cannot be read"),
        ("F*5 F1*5 B1*5 W1 B*5", "comes before its B_INPUT"),
    ],
)
def test_a_schedule_over_chunks_that_cannot_run_is_refused(row: str, says: str, spec: ModelSpec) -> None:
    data = chunked_data()
    data["pipelines"][0]["schedule"]["stages"][0] = row
    with pytest.raises(UserError, match=says) as caught:
        plan_from_dict(data, spec)
    assert "schedule" in (caught.value.field or "")


def test_zero_bubble_over_chunks_keeps_the_caps_of_the_plan(spec: ModelSpec, tmp_path: Path) -> None:
    data = chunked_data() | {"schedule": "zero-bubble"}
    del data["pipelines"][0]["schedule"]
    caps = [3, 1, 2][: len(data["pipelines"][0]["stages"])]
    data["pipelines"][0]["in_flight"] = caps
    plan = plan_from_dict(data, spec)
    (pipeline,) = plan.pipelines
    schedule = pipeline_schedule(plan, pipeline)
    assert schedule.chunks == pipeline.chunks > 1 and splits_backward(plan)
    assert all(held <= schedule.chunks * cap for held, cap in zip(in_flight(schedule), caps, strict=True))
    (tmp_path / "plan.yaml").write_text(dump_yaml(plan))
    assert load_plan(tmp_path / "plan.yaml", spec) == plan
    data["schedule"] = "gpipe"
    del data["pipelines"][0]["in_flight"]
    with pytest.raises(UserError, match="gpipe schedule runs one range.*interleaved, zero-bubble or adaptive"):
        plan_from_dict(data, spec)
