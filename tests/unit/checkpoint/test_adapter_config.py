"""adapter_config.json: every key of peft's is in the table, and the base of PiSSA and OLoRA is peft's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from hetero_megatron.checkpoint.adapter import AdapterWeights, adapter_table
from hetero_megatron.checkpoint.adapter_config import adapter_config, read_config
from hetero_megatron.checkpoint.adapter_keys import INIT, KEYS
from hetero_megatron.checkpoint.hf_load import base_weights
from hetero_megatron.checkpoint.names import module_names, name_table
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec import adapted, load_model, logical_tensors, trained_tensors
from hetero_megatron.spec.adapter_modules import adapters
from tests.support.families import DENSE
from tests.support.hf_reference import make_hf
from tests.support.moe_models import MAMBAS
from tests.support.small_plans import LLAMA

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
TARGETS = ["q_proj", "v_proj", "down_proj"]


def read(folder: Path, **changed: Any) -> Any:
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | changed))
    return read_config(str(folder), "--load-adapter", load_model("tiny"))


def test_every_key_of_pefts_configuration_is_in_the_table(tmp_path: Path) -> None:
    fields = {f.name for f in dataclasses.fields(peft.LoraConfig)}
    assert fields <= KEYS.accepted_keys
    peft.LoraConfig(**{k: v for k, v in PLAIN.items() if k != "peft_type"}).save_pretrained(tmp_path)
    lora = read_config(str(tmp_path), "--load-adapter", load_model("tiny"))
    assert (lora.rank, lora.alpha, lora.residual, lora.dora) == (4, 8.0, None, False)


REFUSED: dict[str, Any] = {
    "peft_type": "ADALORA", "bias": "lora_only", "fan_in_fan_out": True, "modules_to_save": ["lm_head"],
    "layers_to_transform": [6], "layers_pattern": "layers", "exclude_modules": 3, "lora_bias": True,
    "layer_replication": [[0, 2], [1, 2]], "trainable_token_indices": [3], "megatron_config": {"a": 1},
    "use_qalora": True, "use_bdlora": {"nblocks": 2}, "alora_invocation_tokens": [1], "arrow_config": {"top_k": 1},
    "kasa_config": {"beta": 1}, "velora_config": {"scale": 1}, "monteclora_config": {"num_samples": 2},
    "enable_lora": [True, False], "rank_pattern": {"q_proj": 0}, "alpha_pattern": {"q_proj": "2"}, "use_rslora": "no",
    "use_dora": 1, "r": 0, "lora_alpha": True, "lora_dropout": 1.5, "target_modules": ".*q_prj",
    "target_parameters": ["gate.weight"],
}  # fmt: skip


def test_values_that_change_numbers_are_refused_by_name(tmp_path: Path) -> None:
    assert not KEYS.fixed.keys() - REFUSED.keys()
    for key, value in REFUSED.items():
        with pytest.raises(UserError, match=key if key not in ("r", "lora_alpha") else "r"):
            read(tmp_path, **{key: value})
    for init in ("pissa_niter_16", "corda", "lora_ga", "loftq", "mica", "Pissa", "random", 3, [True]):
        with pytest.raises(UserError, match=INIT):
            read(tmp_path, **{INIT: init})
    for init in (True, False, None, "gaussian", "Gaussian", "eva", "orthogonal"):
        assert read(tmp_path, **{INIT: init}).residual is None
    for init, found in (("pissa", "pissa"), ("olora", "olora"), ("OLoRA", "olora")):
        assert read(tmp_path, **{INIT: init}).residual == found


def test_an_unknown_key_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"use_rs_lora.*did you mean use_rslora\?"):
        read(tmp_path, use_rs_lora=True)
    read(tmp_path, use_something_new=False, other=None, more={}, revision="abc", eva_config={"rho": 2.0})


def test_patterns_that_say_what_all_adapters_have_say_nothing(tmp_path: Path) -> None:
    read(tmp_path, rank_pattern={"q_proj": 4, "v_proj": 4}, alpha_pattern={"q_proj": 8.0})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


KINDS = [
    (init, rslora, dtype)
    for init in ("pissa", "olora", "gaussian")
    for rslora, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16))
]


def test_bases_that_first_values_changed_are_pefts(base: Path, tmp_path: Path) -> None:
    for init, rslora, dtype in KINDS:
        folder = tmp_path / f"{init}{rslora}{dtype}"
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights=init, use_rslora=rslora)
        model = peft.get_peft_model(loaded(base, torch.float32), config)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_" in name:
                    param.add_(0.05 * torch.randn_like(param))
        model.save_pretrained(folder)
        theirs = dict(peft.PeftModel.from_pretrained(loaded(base, dtype), folder).named_parameters())
        model_spec = load_model(str(base), "--load-hf")
        spec = adapted(model_spec, read_config(str(folder), "--load-adapter", model_spec))
        assert spec.lora is not None and adapter_config(spec, None)[INIT] == (True if init == "gaussian" else init)
        weights, adapter = base_weights(str(base), spec), AdapterWeights(str(folder), spec)
        for tensor in logical_tensors(spec):
            whole = Box.whole(tensor.shape)
            if tensor.trained:
                found = adapter.read(tensor, whole)
                wanted = theirs[f"base_model.model.{tensor.name.replace('.weight', '.default.weight')}"]
                assert torch.equal(found.float(), wanted.float())
                continue
            found = weights.read(tensor, whole)
            at = tensor.name.removesuffix(".weight")
            names = (f"base_model.model.{at}.base_layer.weight", f"base_model.model.{tensor.name}")
            wanted = next(theirs[name] for name in names if name in theirs)
            # In 16 bits peft decomposes the rounded matrix, and rounds what is left.
            close = 1e-5 if dtype == torch.float32 else 0.02
            assert torch.allclose(found.float(), wanted.float(), atol=close), (init, tensor.name)
            half = Box((1,) + (0,) * (len(tensor.shape) - 1), tensor.shape)
            assert torch.equal(weights.read(tensor, half), found[1:])


def loaded(base: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)


@pytest.mark.parametrize("family", ["phi", "gptj", "starcoder2", "falcon_three_heads"])
def test_projections_have_the_familys_names_in_files(family: str, tmp_path: Path) -> None:
    """peft's adapters of all projections with matrices of their own, read, and named as it names them."""
    hf, plain = make_hf(DENSE[family], seed=1, dtype=torch.float32)
    names = module_names(plain)
    assert names["up_proj"] != "up_proj"
    torch.manual_seed(2)
    model = peft.get_peft_model(hf, peft.LoraConfig(r=3, lora_alpha=6, target_modules=[*names.values()]))
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param)
    model.save_pretrained(tmp_path)
    spec = adapted(plain, read_config(str(tmp_path), "--load-adapter", plain))
    assert spec.lora is not None and spec.lora.targets == tuple(names)
    assert set(adapter_config(spec, None)["target_modules"]) == set(names.values())
    weights, theirs = AdapterWeights(str(tmp_path), spec), dict(model.named_parameters())
    for tensor in trained_tensors(spec):
        module, adapter = tensor.name.split(".lora_")
        stored = name_table(plain)[f"{module}.weight"].name.removesuffix(".weight")
        want = theirs[f"base_model.model.{stored}.lora_{adapter[0]}.default.weight"]
        assert torch.equal(weights.read(tensor, Box.whole(tensor.shape)), want), tensor.name


MODELS = DENSE | MAMBAS | {"llama": LLAMA}
CHOICES: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "lay.*"]},
        {"target_modules": r".*layers\.[12]\.(self_attn\.(q|v)_proj|mlp\.up_proj)"},
        {"target_modules": ["layers.1.self_attn.q_proj", "model.layers.0.mlp.gate_proj", "o_proj"]},
        {"target_modules": ["model.layers.0.self_attn.q_proj", "v_proj"], "layers_to_transform": [1]},
        {"target_modules": "all-linear", "exclude_modules": ["k_proj", "layers.1.self_attn.v_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.0\..*"},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2, r"layers\.1\..*": 5},
         "alpha_pattern": {"layers.0.self_attn.v_proj": 3}, "use_rslora": True},
        {"target_modules": ["q_proj"], "rank_pattern": {"v_proj": 2}, "layers_pattern": None},
        {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 2}},
        {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0, 1], "init_lora_weights": "olora",
         "rank_pattern": {r"model.layers.0.self_attn.q_proj": 2}},
    ],
    "gptj": [
        {"target_modules": ["fc_in"], "layers_to_transform": [0], "layers_pattern": "h"},
        {"target_modules": r"transformer\.h\.1\..*_proj"},
    ],
    "phi3": [
        {"target_modules": ["qkv_proj", "o_proj"], "layers_to_transform": [0, 2], "rank_pattern": {"qkv_proj": 2}},
        {"target_modules": "all-linear", "exclude_modules": r".*\.1\.mlp\..*"},
    ],
    "granite_hybrid": [
        {"target_modules": ["in_proj", "q_proj"], "layers_to_transform": [1, 2], "layers_pattern": "layers"},
        {"target_modules": r".*layers\.[02]\..*(in|q|input)_(proj|linear)", "alpha_pattern": {"in_proj": 3}},
    ],
    "falcon_three_heads": [{"target_modules": ["dense_h_to_4h"], "rank_pattern": {r"h\.1\.mlp\.dense_h_to_4h": 1}}],
}  # fmt: skip


def adapters_of(model: Any) -> dict[str, tuple[tuple[int, ...], float]]:
    """Shape and scale of each A and B of peft's model, by its name in files."""
    found = {}
    for name, module in model.named_modules():
        for part in ("lora_A", "lora_B"):
            if part in getattr(module, "_modules", {}):
                shape = tuple(getattr(module, part)["default"].weight.shape)
                found[f"{name}.{part}.weight"] = shape, module.scaling["default"]
    return found


def test_the_same_modules_have_the_same_adapters_as_in_peft(tmp_path: Path) -> None:
    """As it reads its file, and as it reads ours."""
    for family, choices in CHOICES.items():
        for number, choice in enumerate(choices):
            folder = tmp_path / f"{family}{number}"
            hf, plain = make_hf(MODELS[family], seed=1, dtype=torch.float32)
            peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **choice).save_pretrained(folder)
            theirs = peft.get_peft_model(hf, peft.LoraConfig.from_pretrained(folder))  # the file's order of patterns
            theirs.save_pretrained(folder)
            wanted = adapters_of(theirs)
            spec = adapted(plain, read_config(str(folder), "--load-adapter", plain))
            assert spec.lora is not None
            found, table = {}, adapter_table(spec)
            for tensor in trained_tensors(spec):
                module, source = tensor.name.split(".lora_")[0], table[tensor.name]
                found[source.name] = source.shape(tensor.shape), adapters(spec)[module].scale
            assert found == wanted, (family, choice)
            AdapterWeights(str(folder), spec)
            said = {k: v for k, v in adapter_config(spec, None).items() if k not in ("peft_type", "inference_mode")}
            again = make_hf(MODELS[family], seed=1, dtype=torch.float32)[0]
            assert adapters_of(peft.get_peft_model(again, peft.LoraConfig(**said))) == wanted, (family, choice, said)


def test_choices_that_cannot_be_are_refused_by_name(tmp_path: Path) -> None:
    for key, words, changed in (
        ("target_modules", "model.embed_tokens may have no adapter", {"target_modules": ".*"}),
        ("target_modules", "lm_head may have no adapter", {"target_modules": r"lm_head|.*q_proj"}),
        ("target_modules", "no regular expression", {"target_modules": "(("}),
        ("target_modules", "takes longer than", {"target_modules": r"(?:(.|..)+)+\1\1\1"}),
        ("target_modules", "tiny has no such module", {"target_modules": ["layers.9.self_attn.q_proj", "v_proj"]}),
        ("target_modules", "choose no projection", {"exclude_modules": ["q_proj", "v_proj"]}),
        ("layers_to_transform", "says which layers itself", {"target_modules": ".*q_proj", "layers_to_transform": [0]}),
        ("layers_to_transform", "no layer of tiny", {"layers_to_transform": [True]}),
        ("layers_pattern", "without layers_to_transform", {"layers_pattern": ["layers"]}),
        ("rank_pattern", "is no object", {"rank_pattern": [3]}),
        ("rank_pattern", "no such rank", {"rank_pattern": {"q_proj": 2.5}}),
        ("alpha_pattern", "no such alpha", {"alpha_pattern": {"q_proj": 1e300}}),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words) as caught:
            read(tmp_path, **changed)
        assert caught.value.field == key, changed
