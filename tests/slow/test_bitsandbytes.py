"""Directories that bitsandbytes and transformers wrote: every weight as bitsandbytes dequantises it, to the bit, and
the model's loss. Skipped where bitsandbytes is not installed (``pip install --no-deps bitsandbytes``)."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from hetero_megatron.checkpoint.convert import from_native, to_native
from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.layout import Box
from hetero_megatron.spec import ModelSpec, logical_tensors
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.hf_reference import hf_to_logical

pytestmark = pytest.mark.slow
# Rows of whole blocks: on CPUs bitsandbytes 0.50.2 misreads its own bits where rows of 96 end inside a block.
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4 double": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "nf4 as bf16": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
    "fp4 as fp32": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.float32},
    "int8": {"load_in_8bit": True},
}


def base(path: Path) -> Path:
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(path)
    return path


def require_equal(path: Path, values: dict[str, torch.Tensor], spec: ModelSpec) -> None:
    """What is read, whole and the last third of the rows and columns, is ``values``, by logical name."""
    files = HFWeights(str(path), spec)
    for tensor in logical_tensors(spec):
        part = Box(tuple(size // 3 * 2 + 1 for size in tensor.shape), tensor.shape)
        for box in (Box.whole(tensor.shape), part):
            got, want = files.read(tensor, box), values[tensor.name].detach()[box.slices()]
            assert got.dtype == want.dtype and torch.equal(got, want), (path, tensor.name, box)


@pytest.mark.parametrize("name", CONFIGS)
@torch.compiler.set_stance("force_eager")  # bitsandbytes compiles its own fallback for every shape
def test_what_transformers_wrote(name: str, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for dtype in (torch.float32, torch.float16 if name == "int8" else torch.bfloat16):
        config, path = BitsAndBytesConfig(**CONFIGS[name]), tmp_path / str(dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(
            base(tmp_path / "base"), quantization_config=config, device_map="cpu", dtype=dtype
        )
        model.save_pretrained(path)
        tokens = torch.arange(48).view(4, 12) * 7 % SIZES["vocab_size"]
        values = {n: p.detach() for n, p in model.state_dict().items() if ".weight." not in n}
        for module, linear in model.named_modules():
            weight = getattr(linear, "weight", None)
            if hasattr(weight, "quant_state") and weight.quant_state is not None:
                values[f"{module}.weight"] = functional.dequantize_4bit(weight.data, weight.quant_state)
            elif getattr(weight, "SCB", None) is not None:
                whole = functional.int8_vectorwise_dequant(weight.data, weight.SCB)
                values[f"{module}.weight"] = whole.to(dtype)
        loss = model(input_ids=tokens, labels=tokens).loss.item()  # which moves the scales of int8
        plain = LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype)
        plain.load_state_dict({n: values[n] for n in plain.state_dict()})
        said = json.loads((path / "config.json").read_text())
        require_equal(path, hf_to_logical(plain, from_hf_config(said)), from_hf_config(said))
        to_native(str(path), str(path / "native"))
        from_native(str(path / "native"), str(path / "back"))
        back = AutoModelForCausalLM.from_pretrained(path / "back", dtype=torch.float32)
        # bitsandbytes multiplies in the model's dtype; int8 rounds what is multiplied, too.
        tolerance = 1e-6 if dtype == torch.float32 and name != "int8" else 2e-3
        assert back(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(loss, rel=tolerance)


@torch.compiler.set_stance("force_eager")
def test_every_block_size(tmp_path: Path) -> None:
    """As ``Linear4bit`` packs its state: block sizes that transformers does not set, weights that end inside one."""
    functional = pytest.importorskip("bitsandbytes.functional")
    sizes = SIZES | {"hidden_size": 72, "intermediate_size": 104, "num_attention_heads": 4}
    torch.manual_seed(4)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    for kind, block, double in product(("nf4", "fp4"), (32, 64, 128, 256, 512, 1024, 2048, 4096), (False, True)):
        stored, values = {}, {}
        for name, weight in weights.items():
            if not name.endswith("_proj.weight"):
                stored[name] = values[name] = weight
                continue
            packed, state = functional.quantize_4bit(
                weight, blocksize=block, compress_statistics=double, quant_type=kind
            )
            stored[name] = packed
            stored |= {f"{name}.{part}": t.clone() for part, t in state.as_dict(packed=True).items()}
            values[name] = functional.dequantize_4bit(packed, state)
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
        config["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind).to_dict()
        (tmp_path / "config.json").write_text(json.dumps(config))
        model.load_state_dict(values, strict=False)
        spec = from_hf_config(config)
        require_equal(tmp_path, hf_to_logical(model, spec), spec)
