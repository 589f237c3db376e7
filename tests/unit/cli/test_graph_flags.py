"""--cuda-graph-impl: what it asks for, and everything that it is refused beside."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hetero_megatron.cli.configure import configure
from hetero_megatron.errors import UserError
from hetero_megatron.training.config import RunConfig

BASE = (
    "--model tiny --mock-data --seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3"
)  # fmt: skip
LOCAL = f"{BASE} --cuda-graph-impl local"


def run(words: str, ranks: int = 1) -> RunConfig:
    return configure(words.split(), {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"})


def test_layers_are_captured_after_some_steps() -> None:
    assert run(BASE).graphs_after is None
    assert run(LOCAL).graphs_after == 3, "Megatron's default"
    assert run(f"{LOCAL} --cuda-graph-warmup-steps 1 --cuda-graph-scope full").graphs_after == 1
    fp8 = "--fp8-format e4m3 --fp8-recipe tensorwise --bf16"
    assert run(f"{LOCAL} --hidden-dropout 0.1 --attention-dropout 0.1 {fp8}").graphs_after == 3
    assert run(f"{LOCAL} --tensor-model-parallel-size 2", 2).graphs_after == 3


def test_transformer_engines_graphs_have_no_effect() -> None:
    config = run(f"{BASE} --cuda-graph-impl transformer_engine")
    assert config.graphs_after is None
    assert any("transformer_engine" in notice for notice in config.notices)


@pytest.mark.parametrize(
    ("words", "ranks", "problem"),
    [
        ("--cuda-graph-scope attn", 1, "whole layers"), ("--compile", 1, "--compile"),
        ("--reset-attention-mask", 1, "documents"), ("--reset-position-ids", 1, "documents"),
        ("--check-operators all", 1, "watched"),
        ("--context-parallel-size 2", 2, "context groups"),
    ],
)  # fmt: skip
def test_what_no_graph_can_hold_is_refused(words: str, ranks: int, problem: str) -> None:
    with pytest.raises(UserError) as error:
        run(f"{LOCAL} {words}", ranks)
    assert error.value.field.startswith("--cuda-graph") and problem in str(error.value)


@pytest.mark.parametrize(
    ("stage", "plan", "problem"),
    [({"optimizer": {"offload": True}}, {}, "host memory"), ({}, {"schedule": "zero-bubble"}, "puts off")],
)
def test_plans_whose_layers_cannot_be_captured(
    stage: dict[str, object], plan: dict[str, object], problem: str, tmp_path: Path
) -> None:
    layers = ([0, 2], [2, 6])
    stages = [{"ranks": [r], "layers": layers[r], **stage} for r in (0, 1)]
    document = {
        "version": 1, "seq_length": 32, "global_batch_size": 4, **plan,
        "pipelines": [{"micro_batch_size": 1, "num_micro_batches": 4, "stages": stages}],
    }  # fmt: skip
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(UserError, match=problem):
        run(f"--model tiny --mock-data --plan {path} --train-iters 2 --lr 1e-3 --cuda-graph-impl local", 2)
