"""Weights in block FP8 and MXFP4 are dequantised slice by slice, to the bits of transformers' own dequantisation."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hetero_megatron.checkpoint.convert import from_native, to_native
from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec import logical_tensors
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.families import DENSE
from tests.support.hf_reference import make_hf
from tests.support.moe_models import MOE_FAMILIES

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 16]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}
Tensors = dict[str, torch.Tensor]


def in_fp8(weights: Tensors) -> Tensors:
    """Projections of layers as random values with random scales; the grid's last blocks are smaller ones."""
    out = dict(weights)
    for name, weight in weights.items():
        if ".layers." in name and name.endswith("_proj.weight"):
            rows, columns = weight.shape
            out[name] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
            out[f"{name}_scale_inv"] = torch.rand(-(-rows // 8), -(-columns // 16)) * 0.1
    return out


def plain_fp8(weights: Tensors) -> Tensors:
    """By DeepSeek's rule, block by block; where blocks divide the weight, by transformers too."""
    out = {}
    for name, weight in weights.items():
        scales = weights.get(f"{name}_scale_inv")
        if scales is None:
            out |= {} if name.endswith("_scale_inv") else {name: weight}
            continue
        out[name] = torch.empty(weight.shape, dtype=torch.bfloat16)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = slice(8 * i, 8 * i + 8), slice(16 * j, 16 * j + 16)
                out[name][block] = (weight[block].float() * scales[i, j]).bfloat16()
        if weight.shape[0] % 8 == 0 and weight.shape[1] % 16 == 0:
            theirs = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)
            assert torch.equal(out[name], theirs)
    return out


def in_mxfp4(weights: Tensors) -> Tensors:
    """Experts [experts, inputs, outputs] as random bytes."""
    out = {}
    for name, weight in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            out[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        out[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        out[f"{name}_scales"] = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
    return out


def plain_mxfp4(weights: Tensors) -> Tensors:
    out = {n: t for n, t in weights.items() if not n.endswith(("_blocks", "_scales"))}
    for name in [n for n in weights if n.endswith("_blocks")]:
        whole = name.removesuffix("_blocks")
        out[whole] = convert_moe_packed_tensors(weights[name], weights[f"{whole}_scales"])
    return out


def directory(path: Path, config: dict[str, Any], quantised: dict[str, Any], change: Any, plain: Any) -> Path:
    """``path/narrow`` in the format, and ``path/plain`` of the same values in bf16."""
    hf, _ = make_hf(config, seed=3, dtype=torch.bfloat16)
    hf.save_pretrained(path / "plain")
    (path / "narrow").mkdir()
    said = json.loads((path / "plain" / "config.json").read_text()) | {"quantization_config": quantised}
    (path / "narrow" / "config.json").write_text(json.dumps(said))
    torch.manual_seed(5)
    weights = change(load_file(path / "plain" / "model.safetensors"))
    save_file(weights, path / "narrow" / "model.safetensors", {"format": "pt"})
    values = {name: tensor.contiguous() for name, tensor in plain(weights).items()}
    save_file(values, path / "plain" / "model.safetensors", {"format": "pt"})
    return path


CASES = {
    "deepseek_v3": (MOE_FAMILIES["deepseek_v3"], FP8, in_fp8, plain_fp8),
    "qwen3": (DENSE["qwen3_mixed"], FP8 | {"scale_fmt": "ue8m0"}, in_fp8, plain_fp8),
    "gpt_oss": (
        MOE_FAMILIES["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}, MXFP4, in_mxfp4,
        plain_mxfp4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_any_slice_is_that_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    directory(tmp_path, *CASES[name])
    spec = from_hf_config(json.loads((tmp_path / "narrow" / "config.json").read_text()))
    assert "dequantised to bf16" in " ".join(spec.notices)
    narrow, plain = (HFWeights(str(tmp_path / kind), spec) for kind in ("narrow", "plain"))
    assert any("are dequantised to bf16" in text for text in narrow.notices)
    rng = random.Random(1)
    for tensor in logical_tensors(spec):
        for box in (Box.whole(tensor.shape), *(random_box(rng, tensor.shape) for _ in range(4))):
            got, want = narrow.read(tensor, box), plain.read(tensor, box)
            assert got.dtype == want.dtype and torch.equal(got, want), (tensor.name, box)


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    ends = [sorted(rng.sample(range(size + 1), 2)) for size in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def test_an_export_is_plain(tmp_path: Path) -> None:
    directory(tmp_path, *CASES["gpt_oss"])
    to_native(str(tmp_path / "narrow"), str(tmp_path / "native"))
    from_native(str(tmp_path / "native"), str(tmp_path / "out"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    back, want = (load_file(tmp_path / kind / "model.safetensors") for kind in ("out", "plain"))
    assert back.keys() == want.keys() and all(torch.equal(back[n], want[n]) for n in want)


@pytest.mark.parametrize(
    ("config", "change", "field"),
    [
        ("qwen3", {"weight_block_size": None}, "quantization_config.weight_block_size"),
        ("qwen3", {"weight_block_size": [128]}, "quantization_config.weight_block_size"),
        ("qwen3", {"activation_scheme": "static"}, "quantization_config.activation_scheme"),
        ("qwen3", {"fmt": "e5m2"}, "quantization_config.fmt"), ("qwen3", {"bits": 8}, "quantization_config.bits"),
        ("qwen3", {"quant_method": "mxfp4"}, "quantization_config"),
        ("qwen3", {"quant_method": "awq"}, "quantization_config"),
        ("gpt_oss", {"quant_method": "bitnet"}, "quantization_config"),
        ("gpt_oss", {"weight_block_size": [1, 32]}, "quantization_config.weight_block_size"),
    ],
)  # fmt: skip
def test_other_forms_are_refused_by_name(config: str, change: dict[str, Any], field: str) -> None:
    model, quantised, _, _ = CASES[config]
    with pytest.raises(UserError) as caught:
        from_hf_config(model | {"quantization_config": quantised | change})
    assert caught.value.field == field and caught.value.accepted


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def wrong(weights: Tensors) -> Tensors:
        found = in_fp8(weights)
        name = next(n for n in found if n.endswith("_scale_inv"))
        return found | {name: torch.ones(1, 1)}

    model, quantised, _, _ = CASES["qwen3"]
    directory(tmp_path, model, quantised, wrong, dict)
    with pytest.raises(UserError, match=r"weight_scale_inv is F32 \[1, 1\]"):
        HFWeights(str(tmp_path / "narrow"), from_hf_config(model))
    without = {n: t for n, t in load_file(tmp_path / "narrow" / "model.safetensors").items() if "_scale_inv" not in n}
    save_file(without, tmp_path / "narrow" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="the weights are quantised"):
        HFWeights(str(tmp_path / "narrow"), from_hf_config(model))
