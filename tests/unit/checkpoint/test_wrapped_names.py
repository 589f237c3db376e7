"""Tensors under the names of wrappers, and bases without their prefix: the same weights, or a refusal that says it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec import load_model, logical_tensors

SIZES = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2, "max_position_embeddings": 32}  # fmt: skip
Tensors = dict[str, torch.Tensor]
Rename = Callable[[str], str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What transformers writes."""
    torch.manual_seed(1)
    made: dict[str, Any] = {
        "untied": LlamaForCausalLM(LlamaConfig(**SIZES)),
        "tied": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=32)),
    }
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in made}
    for name, model in made.items():
        model.save_pretrained(folders[name])
    return folders


def copy(source: Path, target: Path, rename: Rename, extra: Tensors | None = None) -> Path:
    shutil.copytree(source, target)
    weights = {rename(name): tensor for name, tensor in load_file(target / "model.safetensors").items()}
    save_file(weights | (extra or {}), target / "model.safetensors", {"format": "pt"})
    return target


def read_all(directory: Path) -> tuple[Tensors, list[str]]:
    spec = load_model(str(directory))
    weights = HFWeights(str(directory), spec)
    return {t.name: weights.read(t, Box.whole(t.shape)) for t in logical_tensors(spec)}, weights.notices


def before(prefix: str) -> Rename:
    return lambda name: prefix + name


def inside(part: str) -> Rename:
    """Around each layer."""
    return lambda name: ".".join([n if not n.isdigit() else f"{n}.{part}" for n in name.split(".")])


WRAPPERS: dict[str, tuple[Rename, list[str]]] = {
    "torch.compile": (before("_orig_mod."), ["without _orig_mod. (torch.compile)"]),
    "DDP": (before("module."), ["without module. (DistributedDataParallel)"]),
    "both": (before("module._orig_mod."), ["_orig_mod. (torch.compile) and module. (DistributedDataParallel)"]),
    "compiled layers": (inside("_orig_mod"), ["without _orig_mod."]),
    "FSDP and checkpointing": (inside("_fsdp_wrapped_module._checkpoint_wrapped_module"), ["FSDP", "activation check"]),
    "PEFT": (before("base_model.model."), ["without base_model.model. (PEFT)"]),
    "Lightning": (before("model."), ["without model. (a module around the model)"]),
}


@pytest.mark.parametrize("model", ["untied", "tied", "gpt2"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_known_wrapper_is_taken_off_and_told(name: str, model: str, models: dict[str, Path], tmp_path: Path) -> None:
    rename, says = WRAPPERS[name]
    want, nothing = read_all(models[model])
    found, notices = read_all(copy(models[model], tmp_path / "m", rename))
    assert not nothing and found.keys() == want.keys() and all(torch.equal(found[n], want[n]) for n in want)
    assert len(notices) == 1 and all(word in notices[0] for word in says), notices


@pytest.mark.parametrize("model", ["tied", "gpt2"])
@pytest.mark.parametrize("wrapped", ["", "module."])
def test_a_base_without_a_head_is_the_whole_of_a_tied_model(
    wrapped: str, model: str, models: dict[str, Path], tmp_path: Path
) -> None:
    whole = AutoModelForCausalLM.from_pretrained(models[model])
    whole.base_model.save_pretrained(tmp_path / "base")
    directory = copy(tmp_path / "base", tmp_path / "m", before(wrapped))
    (want, _), (found, notices) = read_all(models[model]), read_all(directory)
    assert all(torch.equal(found[n], want[n]) for n in want)
    assert "(a base model, saved without its head)" in notices[0] and ("DistributedData" in notices[0]) == bool(wrapped)


def test_the_logits_are_those_of_the_model_that_was_wrapped(models: dict[str, Path], tmp_path: Path) -> None:
    from hetero_megatron.checkpoint.convert import from_native, to_native

    model = AutoModelForCausalLM.from_pretrained(models["untied"])
    compiled = torch.nn.parallel.DataParallel(torch.compile(model), device_ids=[])
    shutil.copytree(models["untied"], tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(compiled.state_dict(), tmp_path / "m" / "pytorch_model.bin")
    done = to_native(str(tmp_path / "m"), str(tmp_path / "native"))
    assert "module. (DistributedDataParallel)" in done["notices"][0]
    from_native(str(tmp_path / "native"), str(tmp_path / "back"))
    ids = torch.arange(20)[None]
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(back(ids).logits, model(ids).logits)


def adapters(name: str) -> str:
    return "base_model.model." + name.replace("q_proj.", "q_proj.base_layer.")


REFUSED: dict[str, tuple[str, Rename, Tensors, list[str]]] = {
    "adapters that are not merged": (
        "untied", adapters, {"base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight": torch.ones(1, 1)},
        ["adapters of PEFT's that are not merged", "lora_A.default.weight", "merge_and_unload", "--load-adapter"],
    ),
    "adapters that were lost": ("untied", adapters, {}, ["not merged", "base_layer.weight"]),
    "an unknown prefix": (
        "untied", before("student."), {}, ["missing model.embed_tokens", "unexpected student.model."],
    ),
    "not on all names": (
        "untied", lambda n: n if "norm" in n else f"module.{n}", {}, ["unexpected module.model.embed_tokens.weight"],
    ),
    "something else beside": (
        "untied", before("module."), {"module.value_head.weight": torch.ones(1)},
        ["without module. (DistributedDataParallel)", "unexpected value_head.weight"],
    ),
    "a base of an untied model": (
        "untied", lambda n: n.removeprefix("model.").replace("lm_head", "x"), {},
        ["with model. before them (a base model", "missing lm_head.weight", "not tied", "a base model without a head"],
    ),
    "one tensor under two names": (
        "tied", before("_orig_mod."), {"model.norm.weight": torch.ones(16)},
        ["holds", "model.norm.weight", "_orig_mod.model.norm.weight", "which are one tensor"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_the_whole_model_is_refused_and_the_wrapper_named(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model, rename, extra, says = REFUSED[name]
    with pytest.raises(UserError) as caught:
        read_all(copy(models[model], tmp_path / "m", rename, extra))
    assert not [word for word in says if word not in str(caught.value)], caught.value
