"""Flags of multi-token prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_megatron.cli.arguments import ArgumentParser
from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.flags.adapter import add_lora, with_lora
from hetero_megatron.errors import UserError
from hetero_megatron.spec import load_model
from tests.support.moe_models import DEEPSEEK_V3

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
