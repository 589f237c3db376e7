"""The key ``roles`` of a plan: it survives being written, who works, what is predicted and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hetero_megatron as hm
from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.main import main
from hetero_megatron.errors import UserError
from hetero_megatron.monitoring import record
from hetero_megatron.plans import all_ranks, dump_yaml, idle_ranks, plan_from_dict, validate
from hetero_megatron.plans.export import FORMATS, export
from hetero_megatron.plans.schema import load_plan
from hetero_megatron.training.config import RoleConfig
from hetero_megatron.utils.yaml_document import from_data, parse_document

CLUSTER = "examples/clusters/testbed.yaml"
RUN = "--plan examples/plans/demo.yaml --cluster examples/clusters/testbed.yaml --model tiny --mock-data --lr 1e-3 "
RUN += "--train-iters 4"


def pipeline(size: int, count: int, stages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"micro_batch_size": size, "num_micro_batches": count, "stages": stages}


def beside(student: list[int], teacher: list[dict[str, Any]]) -> dict[str, Any]:
    """Pipelines of the student on one rank each, and those of a teacher."""
    own = [pipeline(2, 4 // len(student), [{"ranks": rank, "layers": [0, 6]}]) for rank in student]
    made = {"seq_length": 256, "global_batch_size": 8, "pipelines": own}
    return made | {"roles": {"teacher": {"pipelines": teacher}}}


APART = beside([0, 2], [
    pipeline(3, 2, [{"ranks": 1, "layers": [0, 6]}]),
    pipeline(1, 2, [{"ranks": 3, "layers": [0, 2]}, {"ranks": [4, 5], "layers": [2, 6], "tp_split": [2, 1]}]),
])  # fmt: skip


def test_roles_survive_being_written() -> None:
    spec = configure(RUN.split(), {"WORLD_SIZE": "4"}).spec
    roles = {"teacher": replace(spec, num_kv_heads=spec.num_heads)}
    made = plan_from_dict(APART, spec, roles=roles)
    again = load_plan(parse_document(dump_yaml(made), "plan.yaml"), spec, roles=roles)
    assert made == again and made.fingerprint() == again.fingerprint()
    alone = replace(made, roles=())
    assert made != alone and made.fingerprint() != alone.fingerprint()
    assert made.ranks == (0, 2) and all_ranks(made) == (0, 1, 2, 3, 4, 5)
    other = APART | {"roles": {"teacher": {"pipelines": [pipeline(3, 2, [{"ranks": 1, "layers": [0, 6]}])]}}}
    with pytest.raises(UserError, match=r"in roles.teacher: the pipelines compute 6 sequences"):
        plan_from_dict(other, spec, roles=roles)
    with pytest.raises(UserError, match="rank 2 is not used"):
        validate(replace(made, pipelines=made.pipelines[:1], global_batch_size=4), spec)


def test_no_other_format_has_roles() -> None:
    run = configure(RUN.split(), {"WORLD_SIZE": "4"})
    assert run.cluster is not None
    made = plan_from_dict(beside([0], [pipeline(8, 1, [{"ranks": 1, "layers": [0, 6]}])]), run.spec,
                          roles={"teacher": run.spec})  # fmt: skip
    assert idle_ranks(made, run.cluster) == (2, 3)
    for kind in FORMATS:
        with pytest.raises(UserError, match=f"{kind} cannot say roles"):
            export(kind, made, run.spec, run.cluster, "fp32")


def test_a_step_takes_as_long_as_the_longer_of_both() -> None:
    """Of a teacher on slow chips the student waits, of one on fast chips the teacher; what it says takes time to
    arrive, and the loss beside it takes longer."""
    run = configure(RUN.split(), {"WORLD_SIZE": "4"})
    found = {}
    for name, teacher, layers in (("alone", None, 6), ("quick", 1, 6), ("slow", 3, 24)):
        spec = replace(run.spec, num_layers=layers)
        made = beside([0], [pipeline(8, 1, [{"ranks": teacher, "layers": [0, layers]}])])
        if teacher is None:
            del made["roles"]
        plan = plan_from_dict(made, run.spec, run.cluster, roles={"teacher": spec})
        asked = None if teacher is None else RoleConfig("teacher", "", spec, top_k=8)
        prediction, says = record.expectation(replace(run, plan=plan, role=asked))
        assert prediction is not None
        found[name] = prediction, says
        assert record.expected_busy(replace(run, plan=plan, role=asked)).keys() == {0}
        if teacher is not None:  # one price for runs and predictions
            models, cluster = {"teacher": hm.Model.of(spec)}, hm.Cluster.read(CLUSTER)
            read = hm.Plan.read(from_data(made), cluster, hm.Model.of(run.spec), dtype="fp32", beside=models, top_k=8)
            told = hm.predict(read, cluster)
            assert told.step_seconds == prediction.step_seconds and hm.memory(read).keys() == {0, teacher}
            assert told.simulated.role is not None and str(told.simulated.role) in says
            assert "at the same time" in told.page()
            assert [row["rank"] for row in told.as_json()["ranks"]] == [0, teacher]
    alone, (quick, quick_says), (slow, slow_says) = found["alone"][0], found["quick"], found["slow"]
    assert quick.role is not None and slow.role is not None
    assert quick.step_seconds == pytest.approx(quick.role.step_seconds + quick.role.sent)
    link = hm.Cluster.read(CLUSTER).described.ranks  # ranks 0 and 1 are on two nodes
    assert link[0].node != link[1].node and quick.role.sent >= 8 * 256 * 17 * 4 / 50e6
    assert quick.role.step_seconds > alone.step_seconds and "the teacher waits for the student" in quick_says
    assert slow.step_seconds == pytest.approx(slow.role.seconds) and "the student waits for the teacher" in slow_says


def test_predict_knows_a_teacher_on_the_same_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its forward comes before each step, as in a run."""
    run = configure(RUN.split(), {"WORLD_SIZE": "4"})
    prediction, _ = record.expectation(replace(run, role=RoleConfig("teacher", "", run.spec)))
    words = f"predict --plan examples/plans/demo.yaml --cluster {CLUSTER} --model tiny --dtype fp32".split()
    assert main([*words, "--teacher-hf", "tiny", "--json"]) == 0 and prediction is not None
    told = json.loads(capsys.readouterr().out)
    assert told["step_seconds"] == prediction.step_seconds and not told["role"]["own_ranks"]
    assert told["role"]["step_seconds_alone"] + told["role"]["forward_seconds"] == pytest.approx(told["step_seconds"])
    for flags, refused in (
        (["--teacher-hf", "gpt2"], "--teacher-hf = gpt2: another vocabulary"),
        (["--teacher-hf", "tiny", "--preference", "dpo"], "--preference = dpo: not known beside a teacher"),
        (["--teacher-hf", str(tmp_path)], "--teacher-hf"),
        (["--reference-hf", "tiny"], "has no effect without --preference"),
        (["--reference-hf", "tiny", "--preference", "orpo"], "the loss orpo has no reference"),
        (["--reference-hf", "tiny", "--teacher-hf", "tiny"], "--reference-hf = tiny: not known beside a teacher"),
    ):
        assert main([*words, *flags]) == 2
        printed = capsys.readouterr().err.splitlines()
        assert refused in printed[-1] and "Traceback" not in printed[-1], printed
