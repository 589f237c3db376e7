"""The picture of a plan says how uneven tensor-parallel groups cut the model."""

from __future__ import annotations

from dataclasses import replace

from hetero_megatron.plans import format_plan, plan_from_dict
from hetero_megatron.spec import load_model


def test_pictures_show_what_an_uneven_group_gets() -> None:
    spec = replace(load_model("tiny"), ffn_hidden_size=14336, vocab_size=128256)
    stages = [{"ranks": [0, 1], "layers": [0, 3], "tp_split": [3, 2]}, {"ranks": [2, 3], "layers": [3, 6], "tp": 2}]
    pipelines = [{"micro_batch_size": 1, "num_micro_batches": 1, "stages": stages}]
    plan = {"version": 1, "seq_length": 8, "global_batch_size": 1, "pipelines": pipelines}
    picture = format_plan(plan_from_dict(plan, spec), spec)
    assert "ffn 8576:5760" in picture and "vocab 76928:51328" in picture
    assert "7168" not in picture  # equal shares speak for themselves
