"""Model directories of Hugging Face: safetensors in one file or in shards with their index, and .bin."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.fuzz import mutate
from tests.fuzz.documents import LLAMA

_SHAPES = {
    "self_attn.q_proj.weight": (16, 16),
    "self_attn.k_proj.weight": (8, 16),
    "self_attn.v_proj.weight": (8, 16),
    "self_attn.o_proj.weight": (16, 16),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
}
KINDS = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64, torch.uint8)


def tensors() -> dict[str, torch.Tensor]:
    """Weights of the small Llama."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (32, 16),
        "lm_head.weight": (32, 16),
        "model.norm.weight": (16,),
    }
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in _SHAPES.items()}
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def _change(rng: random.Random, made: dict[str, torch.Tensor]) -> None:
    """One change to the tensors themselves."""
    name = rng.choice(sorted(made))
    change = rng.randrange(8)
    if change == 0:
        del made[name]
    elif change == 1:
        made[name] = made[name].to(rng.choice(KINDS))
    elif change == 2:
        made[name] = made[name].reshape(-1)[: rng.choice((0, 1, 5))].clone()
    elif change == 3:
        value = rng.choice((float("nan"), float("inf"), 0.0, 1e38))
        wide = torch.full(made[name].shape, value, dtype=torch.float64)
        made[name] = wide.to(made[name].dtype)  # whatever another damage made of it, also where that has no such value
    elif change == 4:
        made[
            rng.choice((*(t for t in mutate.TEXTS if t.isprintable()), "model.layers.99.mlp.up_proj.weight", "extra"))
        ] = made.pop(name)
    elif change == 5:
        made[name] = made[name].t().contiguous() if made[name].dim() == 2 else made[name][None].clone()
    elif change == 6:
        made[f"{name}_scale_inv"] = torch.ones(1)


def _header(rng: random.Random, path: Path) -> None:
    """A change to the header of a safetensors file, its length made anew, mostly."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = mutate.tree(rng, json.loads(data[8 : 8 + size]))
    text = json.dumps(header).encode()
    length = len(text) if rng.random() < 0.8 else rng.choice((0, 7, 2**63, 2**64 - 1, size * 3))
    path.write_bytes(struct.pack("<Q", length) + text + data[8 + size :])


def _odd_pickle(rng: random.Random, made: dict[str, Any], path: Path) -> None:
    """What a .bin may hold that no model has."""
    odd: dict[Any, Any] = dict(made)
    name = rng.choice(sorted(made))
    change = rng.randrange(6)
    if change == 0:
        odd[7] = odd.pop(name)
    elif change == 1:
        odd[name] = odd[name].to_sparse()
    elif change == 2:
        odd[name] = odd[name].to("meta")
    elif change == 3:
        odd[name] = rng.choice((None, "text", 1.5, [1], {}))
    elif change == 4:
        odd = {"state_dict": odd} if rng.random() < 0.5 else odd
    torch.save(odd if change < 5 else list(odd.values()), path)


def model(rng: random.Random, folder: Path) -> list[str]:
    source = folder / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LLAMA))
    made, form = tensors(), rng.choice(("single", "single", "shards", "shards", "bin", "bin shards"))
    for _ in range(rng.choice((0, 0, 1, 2))):
        _change(rng, made)
    names = sorted(made)
    suffix = ".bin" if "bin" in form else ".safetensors"
    stem = "pytorch_model" if "bin" in form else "model"
    parts = (
        {f"{stem}-0000{i + 1}-of-00002{suffix}": names[i::2] for i in range(2)}
        if "shards" in form
        else {f"{stem}{suffix}": names}
    )
    for file, held in parts.items():
        values = {name: made[name] for name in held}
        _odd_pickle(rng, values, source / file) if suffix == ".bin" and values else save_file(
            values, source / file, {"format": "pt"}
        )
    if "shards" in form:
        index: Any = {
            "metadata": {"total_size": 1},
            "weight_map": {name: file for file, held in parts.items() for name in held},
        }
        for _ in range(rng.randint(0, 2)):
            index = mutate.tree(rng, index)
        data = json.dumps(index).encode()
        (source / f"{stem}{suffix}.index.json").write_bytes(mutate.bytes_of(rng, data) if rng.random() < 0.2 else data)
    target = source / rng.choice(sorted(parts))
    change = rng.random()
    if change < 0.25:
        target.write_bytes(mutate.bytes_of(rng, target.read_bytes()))
    elif change < 0.6 and suffix == ".safetensors":
        _header(rng, target)
    elif change < 0.7:
        mutate.file(rng, rng.choice(sorted(source.iterdir())))
    return ["convert", str(source), str(folder / "out"), "--json"]
