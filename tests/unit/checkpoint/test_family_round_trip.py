"""Directories that transformers wrote, of every family, through a native checkpoint and back: equal bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from hetero_megatron.checkpoint.convert import from_native, to_native
from hetero_megatron.errors import UserError
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.hf_export import to_hf_config
from tests.support.families import DENSE
from tests.support.hf_reference import make_hf
from tests.support.moe_models import HYBRIDS, MAMBAS, MOE_FAMILIES

FAMILIES = DENSE | MOE_FAMILIES | HYBRIDS | MAMBAS
_SECOND = "model.layers.1."
BACK = [
    "gemma2", "gemma3", "phi4_mini", "olmo3_yarn", "smollm3", "glm4", "granite", "mixtral", "gpt_oss", "deepseek_v2",
    "deepseek_v3", "llama4", "gpt_neox_three_heads", "gptj_whole_heads_tied", "phi_qk_norm", "falcon_three_heads",
    "falcon_40b", "cohere_qk_norm", "cohere2_mixed", "stablelm_parallel",
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


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens_are_left_out(family: str, tmp_path: Path) -> None:
    """As transformers leaves them out; what else comes after the last layer is refused."""
    hf, _ = make_hf(FAMILIES[family], seed=3, dtype=torch.float32)
    source, native, target = (tmp_path / name for name in ("source", "native", "target"))
    hf.save_pretrained(source)
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    weights, after = load_file(source / "model.safetensors"), f"model.layers.{config['num_hidden_layers']}."
    again = {after + n.removeprefix(_SECOND): t.clone() for n, t in weights.items() if n.startswith(_SECOND)}
    again |= {after + n: torch.ones(2, 2) for n in ("enorm.weight", "shared_head.head.weight", "embed_tokens.weight")}
    save_file(weights | again, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="unexpected"):
        to_native(str(source), str(native))
    again[f"{after}eh_proj.weight"] = torch.ones(2, 4)
    save_file(weights | again, source / "model.safetensors", {"format": "pt"})
    assert any(after in text for text in to_native(str(source), str(native))["notices"])
    assert any("num_nextn_predict_layers = 1" in text for text in from_hf_config(config).notices)
    from_native(str(native), str(target))
    assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 0
    back, want = AutoModelForCausalLM.from_pretrained(target).state_dict(), hf.state_dict()
    assert back.keys() == want.keys() and all(torch.equal(back[name], want[name]) for name in want)


@pytest.mark.parametrize("family", HYBRIDS)
def test_linear_attention_comes_back_without_what_predicts_further_tokens(family: str, tmp_path: Path) -> None:
    """One matrix by key heads becomes the projections of a layer, and is the same again."""
    hf, _ = make_hf(HYBRIDS[family], seed=3, dtype=torch.float32)
    source, native, target = (tmp_path / name for name in ("source", "native", "target"))
    hf.save_pretrained(source)
    if predicts := not family.startswith("kimi"):
        weights = load_file(source / "model.safetensors") | {"mtp.fc.weight": torch.ones(2, 4)}
        save_file(weights, source / "model.safetensors", {"format": "pt"})
    assert any("mtp." in text for text in to_native(str(source), str(native))["notices"]) == predicts
    from_native(str(native), str(target))
    back, want = AutoModelForCausalLM.from_pretrained(target).state_dict(), hf.state_dict()
    assert back.keys() == want.keys() and all(torch.equal(back[name], want[name]) for name in want)


def test_of_text_and_images_the_language_model_is_read(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28,
        "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
    }  # fmt: skip
    torch.manual_seed(0)
    whole = Llama4ForConditionalGeneration(Llama4Config(text_config=FAMILIES["llama4"], vision_config=vision))
    source, native, target = (str(tmp_path / name) for name in ("source", "native", "target"))
    whole.save_pretrained(source)
    assert any("not read" in notice for notice in to_native(source, native)["notices"])
    from_native(native, target)
    back, want = AutoModelForCausalLM.from_pretrained(target), whole.language_model.state_dict()
    assert back.config.model_type == "llama4_text" and back.state_dict().keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in back.state_dict().items())
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    for key, value in (("text_config", None), ("text_config", {"model_type": "llama"}), ("quantization_config", {})):
        with pytest.raises(UserError) as caught:
            from_hf_config(config | {key: value})
        assert caught.value.field == key


def test_of_qwen_with_images_the_language_model_is_read_as_it_is_released(tmp_path: Path) -> None:
    """All experts in one tensor, and what predicts further tokens beside the model."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24,
              "num_position_embeddings": 16}  # fmt: skip
    torch.manual_seed(0)
    text = {key: value for key, value in FAMILIES["qwen3_5_moe"].items() if key != "model_type"}
    whole = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=vision))
    source, native, target = (tmp_path / name for name in ("source", "native", "target"))
    whole.save_pretrained(source)
    language = whole.model.language_model
    weights = {name: t for name, t in load_file(source / "model.safetensors").items() if ".experts." not in name}
    weights |= {
        f"model.language_model.{name}": t.detach().clone()
        for name, t in language.named_parameters() if ".experts." in name
    }  # fmt: skip
    weights |= {f"mtp.{name}": torch.ones(2, 4) for name in ("fc.weight", "layers.0.mlp.experts.0.up_proj.weight")}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    assert sum("not read" in notice for notice in to_native(str(source), str(native))["notices"]) == 2
    from_native(str(native), str(target))
    back, want = AutoModelForCausalLM.from_pretrained(target), language.state_dict()
    assert back.config.model_type == "qwen3_5_moe_text" and back.model.state_dict().keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in back.model.state_dict().items())
    assert torch.equal(back.lm_head.weight, whole.lm_head.weight)
    save_file(weights | {"model.norm.weight": torch.ones(24)}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="which are one tensor"):
        to_native(str(source), str(tmp_path / "other"))
    config = json.loads((source / "config.json").read_text())
    for key, value in (("tie_word_embeddings", True), ("architectures", ["Qwen3_5MoeModel"]), ("video", 1)):
        with pytest.raises(UserError) as caught:
            from_hf_config(config | {key: value})
        assert caught.value.field == key
