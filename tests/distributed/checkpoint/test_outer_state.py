"""Runs with outer steps as users start them: stopped and started again, evaluated, exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from hetero_megatron.checkpoint import outer_state as saved
from hetero_megatron.checkpoint.boxes import BoxedTensor
from hetero_megatron.checkpoint.native import Checkpoint
from hetero_megatron.checkpoint.outer_state import check_outer, other_rates
from hetero_megatron.comm.fake import FakeComm
from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.run_page import read_run, run_page
from hetero_megatron.parallel.optimizer import SGD
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import ModelSpec, logical_tensors
from hetero_megatron.training.runtime import Runtime
from tests.support.programs import inside, run_ranks
from tests.support.small_plans import LLAMA
from tests.unit.plan.test_bad_input import small_spec
from tests.unit.plan.test_outer import outer_plan

PLAN = """
seq_length: 16
global_batch_size: 6
outer: {islands: ["0-1", 2], every: 4, fragments: 2, delay: 1, mixing: 0.25, compress: int4}
pipelines:
  - micro_batch_size: 2
    num_micro_batches: 2
    stages:
      - {ranks: [0], layers: [0, 3]}
      - {ranks: [1], layers: [3, 4]}
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 2, layers: [0, 4]}]}
"""
SINGLE = """
seq_length: 16
global_batch_size: 6
pipelines:
  - {micro_batch_size: 6, num_micro_batches: 1, stages: [{ranks: 0, layers: [0, 4]}]}
"""
WORDS = ["--mock-data", "--fp64", "--seed", "7", "--lr", "1e-3", "--lr-decay-style", "constant"]
WORDS += ["--eval-iters", "1", "--eval-interval", "100", "--train-iters", "7"]


def words(directory: Path, plan: str) -> list[str]:
    (directory / "model.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 4, "vocab_size": 300}))
    (directory / "plan.yaml").write_text(plan)
    return ["--model", str(directory / "model.json"), "--plan", str(directory / "plan.yaml"), *WORDS]


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_stops_while_an_exchange_is_under_way_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    asked = words(tmp_path, PLAN)
    out, _ = run_ranks(3, [*asked, "--save", str(whole), "--save-hf", str(tmp_path / "hf")])
    assert "notice: outer steps: islands 0-1 | 2 train apart and exchange weights, so the loss depends" in out
    assert "the loss depends on the plan" in run_page(read_run(str(whole)))
    saved = ["--save", str(parts), "--load", str(parts)]
    run_ranks(3, [*asked, *saved, "--exit-interval", "5"])  # in each fragment's second step its exchange begins
    state = json.loads((parts / "iter_0000005" / "metadata.json").read_text())["state"]["outer"]
    assert state["updates"] == 5 and state["under_way"] and state["compress"] == "int4"
    run_ranks(3, [*asked, *saved])
    first, second = ([row for row in metrics(d) if "loss" in row] for d in (whole, parts))
    assert [row["step"] for row in second] == list(range(1, 8))
    assert [(row["loss"], row["grad_norm"]) for row in first] == [(row["loss"], row["grad_norm"]) for row in second]
    for file in sorted((whole / "iter_0000007").glob("*.safetensors")):
        assert file.read_bytes() == (parts / "iter_0000007" / file.name).read_bytes()

    # What is evaluated, exported, and read by whoever knows no islands are the global weights.
    known = next(row["validation_loss"] for row in metrics(whole) if "validation_loss" in row)
    one = words(tmp_path, SINGLE)
    for source in (["--load-hf", str(tmp_path / "hf")], ["--load", str(whole), "--no-load-optim"]):
        again = tmp_path / source[0].strip("-")
        inside([*one, *source, "--skip-train", "--save", str(again)])
        found = next(row["validation_loss"] for row in metrics(again) if "validation_loss" in row)
        assert abs(found - known) < 1e-9 * known, (source, found, known)


THREE_ISLANDS = """
seq_length: 16
global_batch_size: 6
outer: {islands: [0, 1, 2], every: 1, optimizer: {lr: 1, momentum: 0}}
pipelines:
  - {micro_batch_size: 1, num_micro_batches: 3, stages: [{ranks: 0, layers: [0, 4]}]}
  - {micro_batch_size: 2, num_micro_batches: 1, stages: [{ranks: 1, layers: [0, 4]}]}
  - {micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 2, layers: [0, 4]}]}
"""


@pytest.mark.slow
def test_islands_come_and_go(tmp_path: Path) -> None:
    """Two, then three, then one without the others, from the checkpoints of those before: with plain SGD inside and
    outside, and an exchange in every step, that is one process which was never stopped."""
    two = PLAN.replace("every: 4, fragments: 2, delay: 1, mixing: 0.25, compress: int4", "every: 1, optimizer: {lr: 1, "
                       "momentum: 0}")  # fmt: skip
    sgd = ["--optimizer", "sgd", "--sgd-momentum", "0", "--clip-grad", "0"]
    parts, steps = ["--save", str(tmp_path / "parts"), "--load", str(tmp_path / "parts"), *sgd], ["--exit-interval=2"]
    run_ranks(3, [*words(tmp_path, two), *parts, *steps])
    out, _ = run_ranks(3, [*words(tmp_path, THREE_ISLANDS), *parts, *steps])
    assert "between 2 islands, here are 3: the others begin from the global weights" in out
    one = words(tmp_path, SINGLE)
    out, _ = inside([*one, *parts])
    assert "between 3 islands, and the plan has none: it goes on from the global weights" in out
    inside([*one, *sgd, "--save", str(tmp_path / "whole")])
    first, second = ([row for row in metrics(tmp_path / d) if "loss" in row] for d in ("whole", "parts"))
    assert [row["consumed_samples"] for row in second] == [6 * step for step in range(1, 8)]
    assert [row["loss"] for row in second] == pytest.approx([row["loss"] for row in first], rel=1e-12)


def test_other_outer_steps_are_refused_by_name(tmp_path: Path) -> None:
    spec = small_spec()
    rates = {"mixing": 0.25, "lr": 0.7, "momentum": 0.9, "nesterov": 1.0}
    was = {"islands": 2, "every": 12, "fragments": 3, "delay": 2, "updates": 7, "tokens": [[1.0, 2.0]] * 3}
    found = Checkpoint(tmp_path, 7, Metadata({}), {"outer": {**was, "under_way": False, "rates": rates}}, "--load")
    check_outer(found, outer_plan(spec))
    cases = [
        ({"every": 6, "delay": 1}, "every 12 (here 6), delay 2 (here 1)"), ({"fragments": 2}, "fragments 3 (here 2)"),
        ({"optimizer": {"momentum": 0}}, "momentum 0.9 (here 0)"),
    ]  # fmt: skip
    for changes, says in cases:
        with pytest.raises(UserError, match=re.escape(f"made with other outer steps: {says}. Accepted: a plan")):
            check_outer(found, outer_plan(spec, **changes))
    plan = outer_plan(spec, mixing=0, optimizer={"lr": 0.5})
    assert plan.outer is not None
    check_outer(found, plan)
    told = "; the checkpoint was made with"
    said = other_rates(found.state["outer"], plan.outer)
    assert said == [f"outer mixing is 0{told} 0.25", f"outer lr is 0.5{told} 0.7"]
    state, lost = {**was, "rates": rates, "compress": "int8"}, ", and what that lost so far of differences is left out"
    says = {"none": [f"none{told} int8{lost}"], "int4": [f"int4{told} int8"], "int8": []}
    for compress, texts in says.items():
        other = outer_plan(spec, compress=compress).outer
        assert other is not None and other_rates(state, other) == [f"outer compress is {text}" for text in texts]


def fake_runtime(compress: str) -> tuple[Runtime, ModelSpec]:
    """Of rank 3, which is the second island."""
    spec = small_spec()
    compiled = CompiledPlan(outer_plan(spec, compress=compress), spec)
    comm = FakeComm(3, torch.device("cpu"))
    comm.create_groups(compiled.groups)
    return Runtime(
        compiled, comm, torch.float32, lambda _, box: torch.ones(box.shape), lambda groups: SGD(groups, 0.0)
    ), spec  # fmt: skip


def test_what_was_lost_is_read_where_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """And begins with zeros, or is left alone, under another ``compress``."""
    monkeypatch.setattr(saved, "check_model", lambda found, spec: None)
    for was, now, reads in [
        ("int8", "int4", True), ("bf16", "int8", True), (None, "int8", False), ("none", "int4", False),
        ("int8", "none", False),
    ]:  # fmt: skip
        runtime, spec = fake_runtime(now)
        assert runtime.outer is not None
        state = saved.outer_state(runtime.outer) | {"compress": was}
        if was is None:  # of a version without compression
            del state["compress"]
        tensors, _ = saved.outer_tensors(runtime.outer, spec, True, reading=True)
        shapes, read = {key: tensor.shape for key, tensor in tensors.items()}, set[str]()
        found = SimpleNamespace(
            state={"outer": state, "optimizer": None}, metadata=Metadata({}), shape=shapes.get,
            read_into=lambda tensors, group, read=read: read.update(tensors),
        )  # fmt: skip
        saved.load_outer(found, runtime.outer, spec, runtime.world)
        lost = {key for key in read if key.startswith("island.1.lost.")}
        assert len(lost) == (len(logical_tensors(spec)) if reads else 0), (was, now)
        assert any(key.startswith("island.1.model.") for key in read)


@pytest.mark.parametrize(("before", "source"), [(1, 0), (2, 1), (3, 1)])
def test_what_an_island_reads_of_fewer_and_of_more(
    before: int, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Island 1 of two: its own state, or the first one's moments beside the global weights, and no tokens so far."""
    monkeypatch.setattr(saved, "check_model", lambda found, spec: None)
    runtime, spec = fake_runtime("int8")
    outer = runtime.outer
    assert outer is not None
    tokens = [[float(10 * f + i) for i in range(before)] for f in range(len(outer.fragments))]
    state = saved.outer_state(outer) | {"islands": before, "tokens": tokens}
    tensors, _ = saved.outer_tensors(outer, spec, True, reading=True)
    shapes = {key.replace("island.1.", f"island.{source}."): tensor.shape for key, tensor in tensors.items()}
    read = set[str]()

    def read_into(tensors: dict[str, BoxedTensor], group: object) -> None:
        read.update(tensors)
        for key, tensor in tensors.items():
            for _, values in tensor.parts.values():
                values.fill_(2.0 if key.startswith("island.") else 3.0)

    found = SimpleNamespace(
        state={"outer": state, "optimizer": None}, metadata=Metadata({}), shape=shapes.get, read_into=read_into
    )  # fmt: skip
    saved.load_outer(found, outer, spec, runtime.world)
    assert [f.tokens for f in outer.fragments] == [[*row, 0.0][:2] for row in tokens]
    own = {key.split(".")[2] for key in read if key.startswith("island.")}
    assert all(key.startswith(f"island.{source}.") for key in read if key.startswith("island."))
    assert own == ({"model", "lost"} if source else set())
    pieces = [piece for fragment in outer.fragments for piece in fragment.pieces]
    assert all((piece.weights == 3).all() and (piece.master == (2 if source else 3)).all() for piece in pieces)
