"""Adapters of matrices that hold several projections, and of linear attention: what peft writes is read, and counts
and is called as there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_megatron.checkpoint.adapter import AdapterWeights, adapter_table
from hetero_megatron.checkpoint.adapter_config import CONFIG, WEIGHTS, adapter_config, read_config
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec import Lora, adapted, trained_tensors
from hetero_megatron.spec.adapter_modules import adapters
from hetero_megatron.spec.adapter_places import chosen
from hetero_megatron.spec.flops import adapted_layers, trained_count
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.lora import Sites
from tests.support.families import DENSE
from tests.support.hf_reference import hf_to_logical, make_hf
from tests.support.moe_models import HYBRIDS, MAMBAS
from tests.support.peft_reference import targets_outside_experts
from tests.support.selection import quick

MODELS: dict[str, dict[str, Any]] = {
    name: DENSE[name] for name in ("phi3", "glm", "gpt_neox", "falcon", "falcon_three_heads") if name in DENSE
} | HYBRIDS | MAMBAS  # fmt: skip


@pytest.mark.parametrize("family", quick(MODELS, ["phi3", "qwen3_next", "granite_hybrid", "nemotron_h"]))
def test_what_peft_writes_counts_as_there(family: str, tmp_path: Path) -> None:
    """All linear layers; of a mixture of experts, all that tokens do not choose or share."""
    hf, plain = make_hf(MODELS[family], seed=1, dtype=torch.float64)
    base = {name: values.clone() for name, values in hf_to_logical(hf, plain).items()}
    names: Any = "all-linear"
    if plain.moe is not None or family.startswith("nemotron_h"):  # peft's own word includes what it refuses
        names = targets_outside_experts(plain)
    torch.manual_seed(2)
    model = peft.get_peft_model(hf, peft.LoraConfig(r=3, lora_alpha=5, target_modules=names, task_type="CAUSAL_LM"))
    for name, param in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(param)
    model.save_pretrained(tmp_path)
    spec = adapted(plain, read_config(str(tmp_path), "--load-adapter", plain))
    stored = load_file(tmp_path / WEIGHTS)
    assert {source.name for source in adapter_table(spec).values()} == stored.keys()
    assert sum(values.numel() for values in stored.values()) == trained_count(spec)
    weights, tensors = AdapterWeights(str(tmp_path), spec), {t.name: t for t in trained_tensors(spec)}

    def read(name: str) -> torch.Tensor:
        return weights.read(tensors[name], Box.whole(tensors[name].shape)).double()

    merged = hf_to_logical(model.merge_and_unload(), plain)
    for module, adapter in adapters(spec).items():
        delta = adapter.scale * read(f"{module}.lora_B.weight") @ read(f"{adapter.first}.lora_A.weight")
        torch.testing.assert_close(base[f"{module}.weight"] + delta, merged[f"{module}.weight"], rtol=0, atol=1e-5)
    untouched = [name for name in base if name.rpartition(".")[0] not in adapters(spec)]
    assert all(torch.equal(base[name], merged[name]) for name in untouched)
    wanted = names if isinstance(names, list) else {n.removesuffix(".lora_A.weight").rpartition(".")[2] for n in stored
                                                  if n.endswith("lora_A.weight")}  # fmt: skip
    assert set(adapter_config(spec, None)["target_modules"]) == set(wanted)


def test_names_of_a_models_own_code_are_read(tmp_path: Path) -> None:
    """Nemotron-H's before transformers had it: as its files have them."""
    spec = adapted(from_hf_config(MAMBAS["nemotron_h"]), Lora(2, 2.0, ("in_proj", "up_proj")))
    table, torch_values = adapter_table(spec), torch.Generator().manual_seed(0)
    shapes = {table[t.name].name: table[t.name].shape(t.shape) for t in trained_tensors(spec)}
    assert all(".model.layers." in name for name in shapes)
    values = {name: torch.rand(shape, generator=torch_values) for name, shape in shapes.items()}
    (tmp_path / CONFIG).write_text(json.dumps(adapter_config(spec, None)))
    for prefix in ("model.model.", "model.backbone."):
        save_file({name.replace("model.model.", prefix): v for name, v in values.items()}, tmp_path / WEIGHTS)
        weights = AdapterWeights(str(tmp_path), spec)
        for tensor in trained_tensors(spec):
            if tensor.name.endswith("lora_A.weight"):
                whole = weights.read(tensor, Box.whole(tensor.shape))
                assert torch.equal(whole, values[table[tensor.name].name])


def test_parts_are_read_by_rows() -> None:
    """Of key heads one after the other, whatever the cut."""
    spec = adapted(from_hf_config(HYBRIDS["qwen3_next"]), Lora(2, 2.0, ("in_proj_qkvz", "q_proj")))
    names = {t.name for t in trained_tensors(spec) if t.layer == 0}
    assert names == {"model.layers.0.linear_attn.q_proj.lora_A.weight"} | {
        f"model.layers.0.linear_attn.{letter}_proj.lora_B.weight" for letter in "qkvz"
    }
    gated = {t.name.removeprefix("model.layers.3.self_attn.") for t in trained_tensors(spec) if t.layer == 3}
    assert gated == {"q_proj.lora_A.weight", "q_proj.lora_B.weight", "g_proj.lora_B.weight"}


def test_layers_of_a_hybrid_have_what_their_kind_has() -> None:
    spec = from_hf_config(HYBRIDS["qwen3_next"])
    found = adapted_layers(adapted(spec, Lora(2, 2.0, ("k_proj", "out_proj"))))
    assert sorted((len(tensors), count) for tensors, count in found) == [(2, 1), (2, 3)]
    dense = from_hf_config(HYBRIDS["qwen3_5"])  # the first layers have no attention
    some = chosen(dense, Lora(2, 2.0), ["all-linear"], ["0-2"], None)
    assert some == chosen(dense, Lora(2, 2.0), None, ["0-2"], None) and "q_proj" not in some.targets
    with pytest.raises(UserError, match="no such projection in these layers"):
        chosen(dense, Lora(2, 2.0), ["q_proj"], ["0-2"], None)
    sites = (Sites((0,), ("in_proj_ba",), 3, 3.0), Sites((3,), ("q_proj", "o_proj"), 2, 2.0))
    assert trained_count(adapted(spec, Lora(2, 2.0, (), sites=sites))) > 0


def test_projections_of_their_own_stay_where_checkpoints_have_them() -> None:
    """Of Phi-3, by the names of Llama's: an A for each."""
    spec = adapted(from_hf_config(DENSE["phi3"]), Lora(2, 2.0, ("q_proj", "k_proj", "gate_proj")))
    assert len([t for t in trained_tensors(spec) if t.layer == 0]) == 6
    with pytest.raises(UserError, match="no matrix of its own") as caught:
        adapter_table(spec)
    assert "qkv_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "targets", "words"),
    [("qwen3_next", ["all-linear"], "what all tokens share"), ("phi3", ["all-linear", "o_proj"], "is all of them"),
     ("qwen3_next", ["conv1d"], "no such projection"), ("qwen3_next", [".*conv1d"], "may have no adapter"),
     ("granite_hybrid", ["in_proj_qkvz"], "has no such projection"), ("granite_hybrid", ["A_log"], "no such proj"),
     ("granite_hybrid", [".*nothing"], "no such projection"), ("phi3", ["qkv_proj", "q_proj"], "is a part of qkv_proj"),
     ("qwen3_5", [".*norm"], "no such projection"), ("nemotron_h", ["out_proj"], "has no such projection")],
)  # fmt: skip
def test_targets_that_cannot_be_are_refused(family: str, targets: list[str], words: str) -> None:
    spec = from_hf_config(MODELS[family])
    with pytest.raises(UserError, match=words) as caught:
        adapted(spec, chosen(spec, Lora(2, 2.0), targets, None, None))
    assert caught.value.field == "targets"


def test_what_such_adapters_do_not_know_is_refused_by_name() -> None:
    phi, granite, alone = (from_hf_config(MODELS[name]) for name in ("phi3", "granite_hybrid", "nemotron_h_experts"))
    for spec, lora, field in (
        (phi, Lora(2, 2.0, ("qkv_proj",), dora=True), "dora"),
        (granite, Lora(2, 2.0, ("out_proj",), dora=True), "dora"),
        (phi, Lora(2, 2.0, ("gate_up_proj",), residual="pissa"), "residual"),
        (granite, Lora(2, 2.0, ("q_proj",), base_dtype="int8"), "base_dtype"),
        (alone, Lora(2, 2.0, ("up_proj",), base_dtype="int8"), "base_dtype"),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            adapted(spec, lora)
        assert caught.value.field == field
    with pytest.raises(UserError, match="layers of one block, are not stored in few bits"):
        adapted(alone, Lora(2, 2.0, ("up_proj",), base_dtype="nf4"))
    assert adapted(phi, Lora(2, 2.0, ("o_proj",), dora=True)).lora is not None
    with pytest.raises(UserError, match="out of range"):
        Lora(0, 2.0, ("in_proj",))
