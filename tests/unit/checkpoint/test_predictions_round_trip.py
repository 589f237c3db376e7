"""Modules that predict further tokens in released files: read, left out with a notice, refused, written again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.checkpoint.names import hf_source, stored_tensors
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec import ModelSpec, logical_tensors
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.hf_export import export_config, to_hf_config
from tests.support.hf_reference import hf_to_logical, make_hf
from tests.support.moe_models import DEEPSEEK_V3, GLM4_MOE
from tests.support.mtp_reference import add_predictions


def released(family: dict[str, object], count: int, directory: Path) -> tuple[torch.nn.Module, ModelSpec]:
    """Files as they were released: each layer repeats the embedding and the head."""
    hf, spec = make_hf(family, 3, torch.float32)
    spec = add_predictions(hf, spec, count, 0.1, 5)
    hf.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    for i in spec.predictions:
        weights[f"model.layers.{i}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"model.layers.{i}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": count}
    (directory / "config.json").write_text(json.dumps(config))
    return hf, spec


@pytest.mark.parametrize(("family", "count"), [(DEEPSEEK_V3, 1), (GLM4_MOE, 2)])
def test_released_files_are_read_whole_in_part_or_not_at_all(
    family: dict[str, object], count: int, tmp_path: Path
) -> None:
    hf, spec = released(family, count, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    read = from_hf_config(config)
    assert (read.mtp_layers, read.mtp_said) == (0, count)
    assert any(f"--mtp-num-layers {count} has them" in text for text in read.notices)
    for wanted in range(count + 1):
        some = replace(spec, mtp_layers=wanted)
        weights, want = HFWeights(str(tmp_path), some), hf_to_logical(hf, some)
        assert all(torch.equal(weights.read(t, Box.whole(t.shape)), want[t.name]) for t in logical_tensors(some))
        assert any("predict further tokens" in text for text in weights.notices) == (wanted < count)
        # The configuration of an export says what its files hold.
        assert export_config(some, config)["num_nextn_predict_layers"] == wanted
        assert to_hf_config(some)["num_nextn_predict_layers"] == wanted
    with pytest.raises(UserError, match=f"missing model.layers.{spec.num_layers + count}.enorm.weight"):
        HFWeights(str(tmp_path), replace(spec, mtp_layers=count + 1))
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"model.layers.{spec.num_layers}.shared_head.head.weight"][0, 0] += 1
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="shared_head.head.weight with other values than lm_head.weight"):
        HFWeights(str(tmp_path), spec)
    HFWeights(str(tmp_path), replace(spec, mtp_layers=0))


def test_names_are_those_of_released_files() -> None:
    spec = replace(from_hf_config(DEEPSEEK_V3), mtp_layers=1)
    names = {hf_source(spec, stored.name).name for stored, _ in stored_tensors(spec)}
    for part in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight",
                 "mlp.shared_experts.up_proj.weight", "mlp.gate.e_score_correction_bias"):
        assert f"model.layers.{spec.num_layers}.{part}" in names


def test_a_model_with_modules_is_refused_where_it_has_no_sense() -> None:
    spec = from_hf_config(DEEPSEEK_V3)
    for changes, field in (
        ({"mtp_layers": -1}, "mtp_layers"), ({"mtp_layers": True}, "mtp_layers"),
        ({"mtp_loss_factor": -0.1}, "mtp_loss_factor"), ({"mtp_loss_factor": float("inf")}, "mtp_loss_factor"),
        ({"mtp_loss_factor": float("nan")}, "mtp_loss_factor"),
    ):
        with pytest.raises(UserError) as refused:
            replace(spec, **changes)
        assert refused.value.field == field
