"""What a plan was made for: written by ``plan``, defaults of a run, refused where the run asks for other things."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.main import main as hetero_megatron
from hetero_megatron.cli.pretrain import main as pretrain
from hetero_megatron.cli.run_plans import searched
from hetero_megatron.errors import UserError
from hetero_megatron.launch.jobs import Seat
from hetero_megatron.plans import dump_yaml, load_plan
from hetero_megatron.plans.made_for import lora_words, model_hash
from hetero_megatron.spec import load_model
from hetero_megatron.training.config import RunConfig

CLUSTER = """\
nodes: [{name: n, count: 1, chip: c, chips_per_node: 2}]
chips: {c: {memory: MEMORY, emulate: {speed: 0.6}}}
links: {intra_node: {bandwidth: 1 GB/s, latency: 1 us}, inter_node: {bandwidth: 1 GB/s, latency: 1 us}}
"""
PLAN = """\
seq_length: 64
global_batch_size: 4
made_for: {model: tiny, model_hash: HASH, dtype: bf16, optimizer: sgd, memory: {c: 1073741824}}
pipelines: [{micro_batch_size: 2, num_micro_batches: 2, stages: [{ranks: 0-1, layers: [0, 6], tp: 2}]}]
"""
TRAIN = ["--mock-data", "--train-iters", "1", "--lr", "1e-3"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.replace("HASH", model_hash(load_model("tiny"))))
    return path


def dry(path: Path, line: str = "") -> RunConfig:
    return configure(["--dry-run", "--plan", str(path), *line.split()], {})


def test_what_it_was_made_for_is_the_default(written: Path) -> None:
    run = dry(written)
    assert (run.spec.name, run.dtype, run.optimizer.name) == ("tiny", "bf16", "sgd")
    assert sum("the plan was made for it" in notice for notice in run.notices) == 3
    assert dry(written, "--model tiny --bf16 --optimizer sgd").notices == ()


def test_it_survives_a_round_trip_and_is_not_in_the_fingerprint(written: Path) -> None:
    spec = load_model("tiny")
    plan = load_plan(written, spec)
    assert plan.made_for is not None and plan.made_for.memory == (("c", 1 << 30),)
    again = written.parent / "again.yaml"
    again.write_text(dump_yaml(plan))
    assert load_plan(again, spec).made_for == plan.made_for
    plain = written.parent / "plain.yaml"
    plain.write_text("".join(line for line in written.read_text().splitlines(True) if "made_for" not in line))
    assert load_plan(plain, spec).fingerprint() == plan.fingerprint()
    run = dry(plain, "--model tiny")
    assert (run.dtype, run.optimizer.name) == ("fp32", "adam")  # as ever


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        ("--dtype fp32", "--dtype", ["fp32", "bf16"]),
        ("--fp16", "--fp16", ["fp16", "bf16"]),
        ("--fp64 --model tiny", "--fp64", ["fp64", "bf16"]),
        ("--optimizer adam", "--optimizer", ["adam", "sgd"]),
        ("--model gpt2", "model", ["gpt2", "tiny"]),
        ("--num-layers 6 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 --seq-length 64", "model", ["tiny"]),
    ],
)
def test_what_contradicts_it_is_refused_and_both_are_named(
    written: Path, line: str, field: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        dry(written, line)
    assert caught.value.field == field and all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("before", "after"),
    [("bf16", "bf17"), ("sgd", "[sgd]"), ("c: 1073741824", "c: much"), ("c: 1073741824", "c: 0"), ("model: tiny, ", ""),
     ("made_for: {", "made_for: {gpu: 1, ")],
)  # fmt: skip
def test_a_damaged_section_is_refused(written: Path, before: str, after: str) -> None:
    written.write_text(written.read_text().replace(before, after, 1))
    with pytest.raises(UserError, match="made_for"):
        dry(written)


def test_predict_takes_and_refuses_the_same(written: Path, capsys: Any) -> None:
    cluster = written.parent / "cluster.yaml"
    cluster.write_text(CLUSTER.replace("MEMORY", "1 GiB"))
    line = ["predict", "--plan", str(written), "--cluster", str(cluster), "--model", "tiny"]
    assert hetero_megatron([*line, "--dtype", "fp32"]) == 2
    assert "made for bf16" in capsys.readouterr().err
    assert hetero_megatron([*line, "--optimizer", "adam"]) == 2
    assert "made for sgd" in capsys.readouterr().err


def test_ranks_over_their_chips_memory_are_refused_in_one_block(written: Path, capsys: Any) -> None:
    cluster = written.parent / "cluster.yaml"
    cluster.write_text(CLUSTER.replace("MEMORY", "1 MiB"))
    line = ["--dry-run", "--plan", str(written), "--cluster", str(cluster)]
    assert pretrain(line, {}) == 2
    told = capsys.readouterr()
    assert "estimated memory per rank" in told.out and told.err.count("error:") == 1
    assert "0-1 (c) by up to" in told.err and "--allow-over-memory" in told.err
    assert pretrain([*line, "--allow-over-memory"], {}) == 0
    assert "0-1 (c) by up to" in capsys.readouterr().out
    start = ["--plan", str(written), "--cluster", str(cluster), *TRAIN]
    assert pretrain(start, {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}) == 2
    assert "0-1 (c) by up to" in capsys.readouterr().err


def test_chips_with_less_memory_than_it_was_made_for_are_refused(written: Path, capsys: Any) -> None:
    cluster = written.parent / "cluster.yaml"
    cluster.write_text(CLUSTER.replace("MEMORY", "900 MiB"))  # enough for the plan, but not what was planned with
    line = ["--dry-run", "--plan", str(written), "--cluster", str(cluster)]
    assert pretrain(line, {}) == 2
    told = capsys.readouterr().err
    assert "made_for.memory" in told and "c has 900 MiB, not 1 GiB" in told and "--allow-over-memory" in told
    assert pretrain([*line, "--allow-over-memory"], {}) == 0
    assert "notice: the plan was made for chips with more memory" in capsys.readouterr().out
    assert hetero_megatron(["predict", "--plan", str(written), "--cluster", str(cluster)]) == 0
    assert "c has 900 MiB, not 1 GiB" in capsys.readouterr().err
    cluster.write_text(CLUSTER.replace("MEMORY", "2 GiB"))
    assert pretrain(line, {}) == 0


def test_predict_takes_the_model_of_the_plan_where_it_is_known(written: Path, capsys: Any) -> None:
    cluster = written.parent / "cluster.yaml"
    cluster.write_text(CLUSTER.replace("MEMORY", "1 GiB"))
    assert hetero_megatron(["predict", "--plan", str(written), "--cluster", str(cluster)]) == 0
    assert capsys.readouterr().err == ""
    written.write_text(written.read_text().replace("model: tiny", "model: private-7b"))
    assert hetero_megatron(["predict", "--plan", str(written), "--cluster", str(cluster)]) == 2
    assert "--model" in (told := capsys.readouterr().err) and "private-7b" in told


def test_a_plan_searched_after_a_failure_keeps_it(written: Path) -> None:
    cluster = written.parent / "cluster.yaml"
    cluster.write_text(CLUSTER.replace("MEMORY", "1 GiB"))
    config = dry(written)
    path = searched(TRAIN, config, written.parent)([Seat("", 0), Seat("", 1)], cluster)
    assert path is not None and path != written
    assert load_plan(path, load_model("tiny")).made_for == config.plan.made_for


def test_adapters_of_a_plan_are_those_of_a_run(tmp_path: Path, capsys: Any) -> None:
    """``plan`` writes them, a run and ``predict`` take them, and what contradicts them is refused by its flag."""
    cluster, plan = tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    cluster.write_text(CLUSTER.replace("MEMORY", "1 GiB"))
    asked = "--lora-rank 16 --lora-targets q_proj down_proj --use-dora"
    words = f"plan --model tiny --cluster {cluster} --seq-length 64 --global-batch-size 4 --dtype fp32 {asked}"
    assert hetero_megatron([*words.split(), "--quiet", "--no-baselines", "--out", str(plan)]) == 0
    made = load_plan(plan, load_model("tiny")).made_for
    assert made is not None and made.lora is not None and lora_words(made.lora) == asked.split()
    run = dry(plan)
    assert run.spec.lora == made.lora and any(asked in notice for notice in run.notices)
    again = searched(TRAIN, run, tmp_path)([Seat("", 0), Seat("", 1)], cluster)  # after a failure
    assert again is not None and again != plan and dry(again).spec.lora == made.lora
    assert dry(plan, "--lora-rank 16 --lora-alpha 3").spec.lora == replace(made.lora, alpha=3.0)
    capsys.readouterr()
    predict = ["predict", "--plan", str(plan), "--cluster", str(cluster)]
    assert hetero_megatron([*predict, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert hetero_megatron([*predict, *asked.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == alone
    for line, field in (
        ("--lora-rank 8", "--lora-rank"),
        ("--lora-targets o_proj", "--lora-targets"),
        ("--lora-base-dtype int8", "--lora-base-dtype"),
    ):
        with pytest.raises(UserError) as caught:
            dry(plan, line)
        assert caught.value.field == field and f"the plan was made with {asked}" in str(caught.value)
        assert hetero_megatron([*predict, *line.split()]) == 2
        assert f"{field} = " in (told := capsys.readouterr().err) and asked in told


def test_adapters_of_some_layers_are_in_a_plan(tmp_path: Path, capsys: Any) -> None:
    """However they were asked for; what they count is the run's, and predictions are those of the flags."""
    cluster, plan = tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    cluster.write_text(CLUSTER.replace("MEMORY", "1 GiB"))
    words = f"plan --model tiny --cluster {cluster} --seq-length 64 --global-batch-size 4 --dtype fp32 --lora-rank 8"
    for asked in (
        ["--lora-targets", r".*layers\.[45]\.self_attn\.[qv]_proj"],
        ["--lora-targets", "q_proj", "v_proj", "--lora-layers", "4-5"],
        ["--lora-sites", "4:q_proj,v_proj", "5:v_proj,q_proj:8"],
    ):
        assert hetero_megatron([*words.split(), *asked, "--quiet", "--no-baselines", "--out", str(plan)]) == 0
        made = load_plan(plan, load_model("tiny")).made_for
        assert made is not None and made.lora is not None
        wanted = "--lora-rank 8 --lora-targets q_proj v_proj --lora-sites 4-5:q_proj,v_proj:8"
        assert lora_words(made.lora) == wanted.split()
        assert dry(plan).spec.lora == made.lora
        own = dry(plan, "--lora-rank 8 --lora-alpha 3").spec.lora
        assert own is not None and {site.alpha for site in own.sites} == {3.0} and own.shape() == made.lora.shape()
        capsys.readouterr()
        predict = ["predict", "--plan", str(plan), "--cluster", str(cluster), "--json"]
        assert hetero_megatron(predict) == 0
        alone = json.loads(capsys.readouterr().out)
        assert hetero_megatron([*predict, "--lora-rank", "8", *asked]) == 0
        assert json.loads(capsys.readouterr().out) == alone
        assert dry(plan, "--lora-targets q_proj v_proj --lora-layers 4 5").spec.lora == made.lora
    with pytest.raises(UserError, match="the plan was made with"):
        dry(plan, "--lora-layers 0-1")


def test_a_plan_without_adapters_refuses_them_by_their_flag(written: Path) -> None:
    with pytest.raises(UserError) as caught:
        dry(written, "--lora-rank 8")
    assert caught.value.field == "--lora-rank" and "made without adapters" in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    ["lora_rank: 8", "lora_targets: [q_proj]", "lora_rank: 0, lora_targets: [q_proj]", "use_dora: true",
     "lora_rank: 8, lora_targets: [x]", "lora_rank: 8, lora_targets: []",
     "lora_rank: 8, lora_targets: [q_proj], lora_dropout: 1", "lora_rank: 8, lora_targets: [q_proj], use_dora: 3",
     "lora_rank: 8, lora_targets: [q_proj], lora_base_dtype: int4",
     "lora_rank: 8, lora_targets: [q_proj], lora_sites: [x]", "lora_sites: [0:q_proj]",
     "lora_rank: 8, lora_targets: [q_proj], lora_sites: [0:q_proj:0]"],
)  # fmt: skip
def test_damaged_adapters_of_a_section_are_refused(written: Path, keys: str) -> None:
    written.write_text(written.read_text().replace("made_for: {", f"made_for: {{{keys}, ", 1))
    with pytest.raises(UserError, match="made_for"):
        dry(written)


def test_what_is_longer_than_the_model_was_made_for_is_predicted_as_it_was_planned(tmp_path: Path, capsys: Any) -> None:
    cluster, plan = tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    cluster.write_text(CLUSTER.replace("MEMORY", "1 GiB"))
    words = f"plan --model tiny --cluster {cluster} --seq-length 4096 --global-batch-size 1 --dtype fp32 --json"
    assert hetero_megatron([*words.split(), "--quiet", "--no-baselines", "--out", str(plan)]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert hetero_megatron(["predict", "--plan", str(plan), "--cluster", str(cluster), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["step_seconds"] == pytest.approx(planned["step_seconds"], rel=1e-12)
    assert "--max-position-embeddings 4096" in told.err
