"""Flags of multi-token prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hetero_megatron.checkpoint.hf_save import check_target
from hetero_megatron.cli.arguments import ArgumentParser
from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.flags.planned_model import add_lora, with_lora
from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.model import GPTStage
from hetero_megatron.plans import dump_yaml
from hetero_megatron.plans.made_for import MadeFor, model_hash
from hetero_megatron.spec import load_model, whole_share
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.families import DENSE
from tests.support.moe_models import DEEPSEEK_V3


class Alone:
    """The group of one rank."""

    index = 0

    def gather_objects(self, mine: Any, kind: Any) -> list[Any]:
        return [mine]


RUN = "--model tiny --mock-data --seq-length 64 --micro-batch-size 1 --global-batch-size 2 --train-iters 1 --lr 1e-3"
REFUSED = {
    "--mtp-num-layers 64": "at most 63",
    "--mtp-num-layers 65": "at most 64",
    "--mtp-num-layers -1": "an integer >= 0",
    "--mtp-num-layers 1.5": "an integer",
    "--mtp-num-layers 1 --mtp-loss-scaling-factor -0.1": "0 or more",
    "--mtp-num-layers 1 --mtp-loss-scaling-factor nan": "a number",
    "--mtp-num-layers 1 --mtp-loss-scaling-factor inf": "a number",
    "--mtp-num-layers 1 --model gpt2": "rotary positions",
    "--mtp-num-layers 1 --lora-rank 4": "no adapters",
    "--mtp-num-layers 1 --bf16 --fp8-format e4m3 --fp8-recipe tensorwise": "no --fp8-format",
    "--mtp-standalone": "--mtp-num-layers",
    "--mtp-loss-scaling-factor 0.3": "--mtp-num-layers beside it",
}


def test_what_has_no_sense_is_refused() -> None:
    for words, accepted in REFUSED.items():
        with pytest.raises(UserError) as refused:
            configure([*RUN.split(), *words.split()], {})
        assert accepted in str(refused.value), (words, str(refused.value))
        assert "\n" not in str(refused.value)


def test_a_run_has_what_its_flags_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | {"num_nextn_predict_layers": 1}))
    run = RUN.replace("tiny", str(tmp_path))
    without = configure(run.split(), {})
    assert without.spec.mtp_layers == 0 and any("--mtp-num-layers 1" in text for text in without.notices)
    whole = configure([*run.split(), "--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "0.3"], {})
    assert (whole.spec.mtp_layers, whole.spec.mtp_loss_factor) == (1, 0.3)
    assert not any("predict further" in text for text in whole.notices)
    other = configure([*RUN.split(), "--mtp-num-layers", "2"], {})
    assert other.spec.mtp_layers == 2 and any("checkpoints have them" in text for text in other.notices)


def test_plans_are_made_for_modules() -> None:
    parser = ArgumentParser("plan", "")
    add_lora(parser)
    parser.add_argument("--fp8-format")
    args = parser.parse_args(["--mtp-num-layers", "2"])
    assert with_lora(args, load_model("tiny")).mtp_layers == 2
    with pytest.raises(UserError, match="rotary"):
        with_lora(args, load_model("gpt2"))
    with pytest.raises(UserError, match="no --fp8-format"):
        with_lora(parser.parse_args(["--mtp-num-layers", "2", "--fp8-format", "e4m3"]), load_model("tiny"))


def test_generation_leaves_modules_out(tmp_path: Path) -> None:
    """Also under a plan that was made for them; and a plan for a model that may have none names the model."""
    config = configure([*RUN.split(), "--mtp-num-layers", "1"], {})
    made = MadeFor("tiny", model_hash(config.spec), "fp32", "adam", (), mtp_layers=1)
    (tmp_path / "plan.yaml").write_text(dump_yaml(replace(config.plan, made_for=made)))
    words = ["--model", "tiny", "--plan", str(tmp_path / "plan.yaml"), "--dry-run"]
    assert configure(words, {}).spec.mtp_layers == 1
    for more in ([], ["--mtp-num-layers", "1"]):
        assert configure([*words, *more], {}, generates=True).spec.mtp_layers == 0
    trained = replace(load_model("tiny"), mtp_layers=1)
    assert configure(words[2:], {}, trained, generates=True).spec.mtp_layers == 0
    with pytest.raises(UserError, match="made for 1 module that"):
        configure([*words, "--mtp-num-layers", "0"], {})
    with pytest.raises(UserError, match="another model"):
        configure(["--model", "gpt2", *words[2:], "--mtp-num-layers", "0"], {})


def test_every_family_is_exported(tmp_path: Path) -> None:
    """Without modules where it has no names for them."""
    for model in (load_model("tiny"), from_hf_config(DEEPSEEK_V3)):
        check_target(str(tmp_path / "out"), replace(model, mtp_layers=1), cast(Group, Alone()))


def test_a_stage_whose_last_layers_are_modules_alone() -> None:
    """A module turns as the last layer of the model does, also where a stage has none like it."""
    spec = replace(from_hf_config(DENSE["gemma3"]), mtp_layers=1)
    others = [i for i in range(spec.num_layers) if spec.layer(i).rope != spec.layer(spec.num_layers - 1).rope]
    stage = GPTStage(spec, whole_share(spec), others[:1], embed=True, head=True)
    tokens = torch.arange(8)[None]
    ahead = SimpleNamespace(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool))
    batch = SimpleNamespace(positions=tokens, documents=None, loss_mask=None, draws=None, ahead=[ahead])
    assert stage(tokens, batch).shape[:2] == (2, 8)
