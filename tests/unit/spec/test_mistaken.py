"""What people give as a model that is none is named, with what to give instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_megatron.cli import convert
from hetero_megatron.errors import UserError
from hetero_megatron.spec import load_model

ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B"})
MISTAKEN: dict[str, tuple[dict[str, str], str, list[str]]] = {
    "an adapter": (
        {"adapter_config.json": ADAPTER, "adapter_model.safetensors": ""}, "",
        ["is an adapter of PEFT's (of meta-llama/Llama-3.1-8B)", "--load-adapter"],
    ),
    "a damaged adapter": ({"adapter_config.json": "{"}, "", ["an adapter of PEFT's. Accepted: the model as --load-hf"]),
    "a folder of GGUF": ({"model-Q4_K_M.gguf": "GGUF", "README.md": ""}, "", ["holds GGUF", "gguf_file=FILE"]),
    "a file of GGUF": ({"model": "GGUF\3\0"}, "model", ["is a GGUF file", "before quantisation", "gguf_file=FILE"]),
    "weights": ({"model.safetensors": "", "config.json": "{}"}, "model.safetensors", ["is a file of weights"]),
    "pickled weights": ({"model.pth": ""}, "model.pth", ["is a file of weights", "the directory that it is in"]),
    "the authors' own form": (
        {"params.json": "{}", "consolidated.00.pth": ""}, "",
        ["their authors' own format", "convert_…_weights_to_hf.py"],
    ),
    "another program's": (
        {"global_step5/mp_rank_00_model_states.pt": ""}, "", ["is a DeepSpeed checkpoint", "zero_to_fp32"],
    ),
    "a folder of models": (
        {"checkpoint-5/config.json": "{}", "checkpoint-9/config.json": "{}"}, "",
        ["a directory of Hugging Face checkpoints", "one of the folders in it: checkpoint-5, checkpoint-9"],
    ),
}  # fmt: skip


def test_checkpoints_of_a_training_are_for_another_flag(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt").write_text("")
    for path in (tmp_path, tmp_path / "iter_0000100"):
        with pytest.raises(UserError, match=r"--load-hf = .*is a Megatron-LM \(.*\) checkpoint. Accepted: .*convert"):
            load_model(str(path), "--load-hf")
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "latest").write_text("iter_0000002")
    with pytest.raises(UserError, match="--load-hf = .*is a directory of checkpoints. Accepted: --load, or"):
        load_model(str(tmp_path), "--load-hf")


@pytest.mark.parametrize("flag", ["--load-hf", "--model", "SOURCE"])
@pytest.mark.parametrize("name", MISTAKEN)
def test_what_is_no_model_is_named(name: str, flag: str, tmp_path: Path) -> None:
    files, given, says = MISTAKEN[name]
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    path = str(tmp_path / given)
    with pytest.raises(UserError) as caught:
        if flag == "SOURCE":
            convert.main([path, str(tmp_path / "out")])
        else:
            load_model(path, flag)
    assert not [word for word in [flag, path.rstrip("/"), *says] if word not in str(caught.value)], caught.value


def test_quantised_weights_are_named_by_their_method(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"quantised \(awq\).*Accepted: null: .*from before the quantisation"):
        load_model(str(tmp_path))
