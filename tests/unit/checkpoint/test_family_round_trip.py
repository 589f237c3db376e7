"""Directories that transformers wrote, of every family, through a native checkpoint and back: equal bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_megatron.checkpoint.convert import from_native, to_native
from hetero_megatron.spec import from_hf_config, to_hf_config
from tests.support.families import DENSE
from tests.support.hf_reference import make_hf
from tests.support.moe_models import MOE_FAMILIES

FAMILIES = DENSE | MOE_FAMILIES
BACK = [
    "gemma2", "gemma3", "phi4_mini", "olmo3_yarn", "smollm3", "glm4", "granite", "mixtral", "gpt_oss", "deepseek_v2",
    "deepseek_v3",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_is_written_as_it_was_read(family: str) -> None:
    spec = from_hf_config(FAMILIES[family])
    assert from_hf_config(to_hf_config(spec)) == spec


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_of_a_configuration_says_the_same(family: str) -> None:
    written = json.loads(AutoConfig.for_model(**FAMILIES[family]).to_json_string())
    assert from_hf_config(written) == from_hf_config(FAMILIES[family])


@pytest.mark.parametrize("family", BACK)
def test_weights_come_back(family: str, tmp_path: Path) -> None:
    hf, _ = make_hf(FAMILIES[family], seed=3, dtype=torch.float32)
    source, native, target = (str(tmp_path / name) for name in ("source", "native", "target"))
    hf.save_pretrained(source)
    to_native(source, native)
    from_native(native, target)
    back, want = AutoModelForCausalLM.from_pretrained(target).state_dict(), hf.state_dict()
    assert back.keys() == want.keys()
    assert all(torch.equal(back[name], want[name]) for name in want)
    assert from_hf_config(AutoModelForCausalLM.from_pretrained(target).config.to_dict()) == from_hf_config(
        hf.config.to_dict()
    )
