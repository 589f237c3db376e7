"""Weights in block FP8, MXFP4 and bitsandbytes' formats are dequantised slice by slice, to the bits of transformers'
dequantisation, or of NumPy's by the format's rules."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hetero_megatron.checkpoint.convert import from_native, to_native
from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.checkpoint.names import hf_source
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.ops.nf4_weight import quantize_nf4
from hetero_megatron.spec import logical_tensors
from hetero_megatron.spec.adapted_model import adapted
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.lora import NF4_BYTES, Lora
from tests.support.families import DENSE
from tests.support.hf_reference import make_hf
from tests.support.moe_models import MOE_FAMILIES
from tests.support.nf4_reference import NF4, dynamic

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 16]}
FOUR_BITS = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").to_dict()
DTYPES = {"nf4": "fp32", "fp4": "fp16"}
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


def in_four_bits(
    weights: Tensors, double: bool, dtype: str, block: int, quant_type: str = "nf4", storage: torch.dtype = torch.uint8
) -> Tensors:
    """Projections of layers as random codes and scales, under bitsandbytes' names."""
    out = dict(weights)
    for name in [n for n in weights if ".layers." in n and n.endswith("_proj.weight")]:
        shape, elements = list(weights[name].shape), weights[name].numel()
        blocks, state = -(-elements // block), {"quant_type": quant_type, "blocksize": block, "dtype": dtype}
        state["shape"] = shape
        out[name] = torch.randint(0, 256, (-(-elements // 2), 1), dtype=torch.uint8).flatten().view(storage)[:, None]
        out[f"{name}.quant_map"] = torch.tensor(NF4) if quant_type == "nf4" else torch.randn(16)
        out[f"{name}.absmax"] = torch.rand(blocks)
        if double:
            out[f"{name}.absmax"] = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
            out[f"{name}.nested_absmax"] = torch.rand(-(-blocks // 256)) * 0.01
            out[f"{name}.nested_quant_map"] = torch.tensor(dynamic())
            offset = float(np.float32(0.0625 + 1e-4 * blocks))  # a number that fp32 holds
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        text = json.dumps(state).encode()
        out[f"{name}.quant_state.bitsandbytes__{quant_type}"] = torch.tensor(list(text), dtype=torch.uint8)
    return out


def plain_four_bits(weights: Tensors) -> Tensors:
    """Element by element, in fp32, as bitsandbytes' documentation says."""
    out = {}
    for name, weight in weights.items():
        stored = next((n for n in weights if n.startswith(f"{name}.quant_state")), None)
        if stored is None:
            out |= {} if ".weight." in name else {name: weight}
            continue
        state = json.loads(bytes(weights[stored].tolist()))
        scales = weights[f"{name}.absmax"].numpy()
        if "nested_blocksize" in state:
            groups = weights[f"{name}.nested_absmax"].numpy()[np.arange(len(scales)) // 256]
            scales = weights[f"{name}.nested_quant_map"].numpy()[scales] * groups + np.float32(state["nested_offset"])
        codes = [nibble for byte in weight.flatten().view(torch.uint8).tolist() for nibble in (byte >> 4, byte & 15)]
        elements = weights[f"{name}.quant_map"].numpy()[codes[: math.prod(state["shape"])]]
        values = elements * scales[np.arange(len(elements)) // state["blocksize"]]
        out[name] = torch.from_numpy(values).view(state["shape"]).to(getattr(torch, state["dtype"]))
    return out


def in_int8(weights: Tensors) -> Tensors:
    out = dict(weights)
    for name in [n for n in weights if ".layers." in n and n.endswith("_proj.weight")]:
        out[name] = torch.randint(-127, 128, weights[name].shape, dtype=torch.int8)
        module = name.removesuffix(".weight")
        out |= {f"{module}.SCB": torch.rand(len(weights[name])), f"{module}.weight_format": torch.tensor(0).byte()}
    return out


def plain_int8(weights: Tensors) -> Tensors:
    out = {}
    for name, weight in weights.items():
        scales = weights.get(name.removesuffix("weight") + "SCB")
        if scales is not None and weight.dtype == torch.int8:  # as transformers' integrations/bitsandbytes.py
            weight = (weight * scales.view(-1, 1) * 7.874015718698502e-3).bfloat16()
        out |= {} if name.endswith((".SCB", ".weight_format")) else {name: weight}
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
    "nf4 double": (DENSE["llama_yarn"], FOUR_BITS, partial(in_four_bits, double=True, dtype="bfloat16", block=64),
                   plain_four_bits),
    "nf4": (DENSE["qwen3_mixed"], FOUR_BITS, partial(in_four_bits, double=False, dtype="float32", block=128),
            plain_four_bits),
    "fp4": (DENSE["qwen3_mixed"], {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            partial(in_four_bits, double=True, dtype="float16", block=32, quant_type="fp4"), plain_four_bits),
    "nf4 as fp32": (
        DENSE["llama_yarn"], FOUR_BITS | {"bnb_4bit_quant_storage": "float32"},
        partial(in_four_bits, double=False, dtype="bfloat16", block=32, storage=torch.float32), plain_four_bits,
    ),
    "int8": (DENSE["llama_yarn"], BitsAndBytesConfig(load_in_8bit=True).to_dict(), in_int8, plain_int8),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_any_slice_is_that_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    directory(tmp_path, *CASES[name])
    spec = from_hf_config(json.loads((tmp_path / "narrow" / "config.json").read_text()))
    assert "are dequantised as they are read" in " ".join(spec.notices)
    narrow, plain = (HFWeights(str(tmp_path / kind), spec) for kind in ("narrow", "plain"))
    assert any(f"are dequantised to {DTYPES.get(name, 'bf16')}" in text for text in narrow.notices)
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


STATE = ".quant_state.bitsandbytes__nf4"


def said_otherwise(weights: Tensors, part: str, change: Callable[[Any], Any]) -> Tensors:
    """A stored tensor of the first projection, or a key of its state, changed."""
    found = dict(weights)
    name = next(n for n in found if n.endswith(STATE)).removesuffix(STATE)
    if f"{name}.{part}" in found or not part:
        stored = f"{name}.{part}" if part else name
        changed = change(found.pop(stored))
        return found | ({} if changed is None else {stored: changed})
    state = json.loads(bytes(found[name + STATE].tolist()))
    text = (change(state) if part == "state" else json.dumps(state | {part: change(state.get(part))})).encode()
    return found | {name + STATE: torch.tensor(list(text), dtype=torch.uint8)}


def test_bits_that_contradict_what_stands_beside_them_are_refused(tmp_path: Path) -> None:
    model, quantised, _, _ = CASES["nf4 double"]
    spec = from_hf_config(model)
    changes: list[tuple[str, Callable[[Any], Any], str]] = [
        ("", lambda x: x[:-1], "proj.weight is U8"), ("", lambda x: x.to(torch.int8), "proj.weight is I8"),
        ("", lambda x: x.flatten().view(1, -1), "proj.weight is U8"), ("", lambda x: None, "beside"),
        ("absmax", lambda x: x[:-1], "absmax is U8"), ("absmax", lambda x: x.float(), "absmax is F32"),
        ("absmax", lambda x: None, "beside .*absmax"), ("nested_absmax", lambda x: None, "beside .*nested_absmax"),
        ("nested_absmax", lambda x: x * math.nan, "finite"), ("quant_map", lambda x: x[:8], "quant_map is F32"),
        ("nested_quant_map", lambda x: x[:8], "nested_quant_map is F32"),
        ("state", lambda x: "[1]", "no JSON object"), ("state", lambda x: "{", "JSON"), ("state", lambda x: "", "JSON"),
        ("shape", lambda x: x[::-1], "does not fit the model"), ("shape", lambda x: [*x, 1], "shape"),
        ("shape", lambda x: [1 << 40, 1 << 40], "shape"), ("shape", lambda x: [True, 4], "shape"),
        ("shape", lambda x: None, "shape"), ("blocksize", lambda x: 0, "blocksize"),
        ("blocksize", lambda x: 63, "shape"), ("blocksize", lambda x: 1e9, "blocksize"),
        ("blocksize", lambda x: True, "blocksize"),
        ("dtype", lambda x: "int8", "dtype"), ("dtype", lambda x: ["bfloat16"], "dtype"),
        ("nested_blocksize", lambda x: 0, "nested_blocksize"), ("nested_offset", lambda x: "1", "nested_offset"),
        ("nested_offset", lambda x: 1e300, "nested_offset"), ("nested_offset", lambda x: math.nan, "NaN|nested_offset"),
    ]  # fmt: skip
    directory(tmp_path, model, quantised, dict, dict)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    plain = in_four_bits(plain, double=True, dtype="bfloat16", block=64)
    for part, change, says in changes:
        save_file(said_otherwise(plain, part, change), tmp_path / "narrow" / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=says):
            HFWeights(str(tmp_path / "narrow"), spec)


def test_in_four_bits_again_they_are_the_same_bits(tmp_path: Path) -> None:
    """A base that is frozen in NF4 has the bits of the files."""
    model = DENSE["llama_yarn"] | {"hidden_size": 64, "intermediate_size": 128}

    def quantised(weights: Tensors) -> Tensors:
        stored = in_four_bits(weights, double=True, dtype="bfloat16", block=64)
        for name in [n for n in weights if f"{n}{STATE}" in stored]:
            whole = weights[name].float()
            packed, scales = quantize_nf4(whole, (0, whole.shape[0]), (0, whole.shape[1]))
            blocks = packed.view(-1, NF4_BYTES)
            state = json.loads(bytes(stored[name + STATE].tolist())) | {"nested_offset": scales.mean.item()}
            stored |= {
                name: blocks[:, :-1].reshape(-1, 1), f"{name}.absmax": blocks[:, -1].clone(),
                f"{name}.nested_absmax": scales.groups,
                name + STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
            }  # fmt: skip
        return stored

    directory(tmp_path, model, FOUR_BITS, quantised, plain_four_bits)
    spec = from_hf_config(model)
    files = HFWeights(str(tmp_path / "narrow"), spec)
    narrow, compared = load_file(tmp_path / "narrow" / "model.safetensors"), 0
    frozen = adapted(spec, Lora(2, 4.0, ("q_proj",), base_dtype="nf4"))
    for tensor in (t for t in logical_tensors(frozen) if t.nf4):
        values = files.read(tensor, Box.whole(tensor.shape))
        packed, scales = quantize_nf4(values, (0, tensor.shape[0]), (0, tensor.shape[1]))
        source = hf_source(spec, tensor.name).name
        torch.testing.assert_close(scales.widened(packed, torch.float32), values, rtol=0.01, atol=0)  # the scales'
        assert torch.equal(packed.view(-1, NF4_BYTES)[:, :-1].flatten(), narrow[source].flatten())
        compared += files.dtype(tensor) == torch.bfloat16 and values.dtype == torch.float32
    assert compared == 21
