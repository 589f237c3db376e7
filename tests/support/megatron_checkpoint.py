"""Checkpoints in Megatron-LM's formats, made of a Hugging Face model by the layout that Megatron documents.

``torch``: a file per tensor and pipeline rank; ``torch_dist``: torch's distributed checkpoint. Which tensor is cut
along which axis, and in which order queries, keys and values are, is written here anew, independently of the reader.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import itertools
import json
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hetero_megatron.spec import ModelSpec, logical_tensors
from tests.support.hf_reference import hf_to_logical

PADDED = 128  # rows of the embedding are a multiple of it
EXPERTS = ".mlp.experts.experts."


@contextlib.contextmanager
def megatron_modules() -> Iterator[type[enum.Enum]]:
    """A class as it is in stored arguments, importable only while they are written."""
    module = types.ModuleType("megatron.core.enums")
    kind = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module="megatron.core.enums")
    module.ModelType = kind  # type: ignore[attr-defined]
    names = {"megatron": types.ModuleType("megatron"), "megatron.core": types.ModuleType("megatron.core")}
    added = {**names, "megatron.core.enums": module}
    sys.modules.update(added)
    try:
        yield kind
    finally:
        for name in added:
            del sys.modules[name]


def arguments(spec: ModelSpec, **changes: Any) -> dict[str, Any]:
    """What Megatron's arguments say about the model, among others."""
    rope = spec.ropes[0] if spec.ropes else None
    return {
        "num_layers": spec.num_layers, "hidden_size": spec.hidden_size, "ffn_hidden_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_heads, "group_query_attention": spec.num_kv_heads < spec.num_heads,
        "num_query_groups": spec.num_kv_heads, "kv_channels": spec.head_dim, "seq_length": 32,
        "max_position_embeddings": spec.max_position_embeddings, "norm_epsilon": spec.norm_eps,
        "position_embedding_type": "rope" if rope else "learned_absolute", "rotary_base": rope.theta if rope else 10000,
        "rotary_percent": 1.0, "normalization": "RMSNorm" if spec.norm == "rms" else "LayerNorm",
        "swiglu": spec.activation == "swiglu", "squared_relu": False, "openai_gelu": False, "qk_l2_norm": False,
        "bias_gelu_fusion": spec.activation == "gelu_tanh", "add_bias_linear": spec.mlp_bias,
        "add_qkv_bias": spec.qkv_bias and not spec.mlp_bias, "qk_layernorm": spec.qk_norm == "head",
        "untie_embeddings_and_output_weights": not spec.tied, "vocab_size": None, "init_method_std": 0.02,
        "num_experts": None, "window_size": None, "softmax_type": "vanilla", "bf16": True, "micro_batch_size": 4,
        "params_dtype": torch.bfloat16, "apply_layernorm_1p": False, "multi_latent_attention": False,
        **_experts(spec), **_latents(spec), **changes,
    }  # fmt: skip


def _latents(spec: ModelSpec) -> dict[str, Any]:
    mla = spec.mla
    if mla is None:
        return {}
    scaling = spec.ropes[0].scaling
    return {
        "multi_latent_attention": True, "qk_layernorm": True, "group_query_attention": False, "num_query_groups": 1,
        "q_lora_rank": mla.q_rank, "kv_lora_rank": mla.kv_rank, "qk_head_dim": mla.nope_dim,
        "qk_pos_emb_head_dim": mla.rope_dim, "v_head_dim": mla.v_dim, "rope_type": "yarn" if scaling else "rope",
        "rotary_scaling_factor": scaling.factor if scaling else 1.0, "mscale_all_dim": mla.mscale_all_dim,
        "kv_channels": spec.hidden_size // spec.num_heads, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": scaling.original_max_position_embeddings if scaling else 4096,
    }  # fmt: skip


def _experts(spec: ModelSpec) -> dict[str, Any]:
    moe = spec.moe
    if moe is None:
        return {}
    groups, sigmoid = moe.groups > 1, moe.score == "sigmoid"
    return {
        "num_experts": moe.num_experts, "moe_router_topk": moe.top_k, "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_layer_freq": [int(kind == "moe") for kind in (layer.mlp for layer in spec.layers)],
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax", "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_pre_softmax": not sigmoid and not moe.normalize, "moe_router_enable_expert_bias": moe.score_bias,
        "moe_router_num_groups": moe.groups if groups else None, "moe_router_topk_scaling_factor": moe.scale,
        "moe_router_group_topk": moe.top_groups if groups else None, "moe_latent_size": None,
        "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
    }  # fmt: skip


def core_tensors(model: torch.nn.Module, spec: ModelSpec, fused_norms: bool = True) -> dict[str, torch.Tensor]:
    """Whole tensors by Megatron Core's names, layers numbered through the model."""
    logical = hf_to_logical(model, spec)
    found: dict[str, torch.Tensor] = {}
    outside = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight", "lm_head.weight": "output_layer.weight",
        "model.embed_positions.weight": "embedding.position_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight", "model.norm.bias": "decoder.final_layernorm.bias",
    }  # fmt: skip
    for tensor in logical_tensors(spec):
        if tensor.name in outside:
            found[outside[tensor.name]] = logical[tensor.name]
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in found:
            rows = -len(found[name]) % PADDED
            found[name] = torch.cat([found[name], torch.full((rows, spec.hidden_size), 7.0).to(found[name].dtype)])
    for i in range(spec.num_layers):
        start = f"model.layers.{i}."
        mine = {name.removeprefix(start): value for name, value in logical.items() if name.startswith(start)}
        for name, value in _layer(mine, spec, fused_norms).items():
            found[f"decoder.layers.{i}.{name}"] = value
    return found


def _layer(mine: dict[str, torch.Tensor], spec: ModelSpec, fused_norms: bool) -> dict[str, torch.Tensor]:
    before_qkv = "self_attention.linear_qkv.layer_norm_" if fused_norms else "input_layernorm."
    if spec.mla is not None:
        before_qkv = "input_layernorm."
    before_mlp = "mlp.linear_fc1.layer_norm_" if fused_norms and "mlp.gate.weight" not in mine else "pre_mlp_layernorm."
    found = {}
    for kind in ("weight", "bias"):
        plain = {
            f"input_layernorm.{kind}": before_qkv + kind, f"post_attention_layernorm.{kind}": before_mlp + kind,
            f"self_attn.q_norm.{kind}": f"self_attention.q_layernorm.{kind}",
            f"self_attn.k_norm.{kind}": f"self_attention.k_layernorm.{kind}",
            f"self_attn.q_a_proj.{kind}": f"self_attention.linear_q_down_proj.{kind}",
            f"self_attn.q_b_proj.{kind}": f"self_attention.linear_q_up_proj.{kind}",
            f"self_attn.kv_a_proj_with_mqa.{kind}": f"self_attention.linear_kv_down_proj.{kind}",
            f"self_attn.kv_b_proj.{kind}": f"self_attention.linear_kv_up_proj.{kind}",
            **{
                f"self_attn.{ours}_a_layernorm.{kind}": (
                    f"self_attention.linear_{ours}_up_proj.layer_norm_{kind}" if fused_norms
                    else f"self_attention.{ours}_layernorm.{kind}"
                ) for ours in ("q", "kv")
            },
            f"self_attn.o_proj.{kind}": f"self_attention.linear_proj.{kind}",
            f"mlp.down_proj.{kind}": f"mlp.linear_fc2.{kind}", f"mlp.gate.{kind}": f"mlp.router.{kind}",
            f"mlp.experts.down_proj.{kind}": f"mlp.experts.experts.linear_fc2.{kind}",
            f"mlp.shared_expert.down_proj.{kind}": f"mlp.shared_experts.linear_fc2.{kind}",
            f"mlp.shared_expert_gate.{kind}": f"mlp.shared_experts.gate_{kind}",
            "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
        }  # fmt: skip
        found |= {theirs: mine[ours] for ours, theirs in plain.items() if ours in mine}
        if spec.mla is not None and f"self_attn.q_proj.{kind}" in mine:
            found[f"self_attention.linear_q_proj.{kind}"] = mine[f"self_attn.q_proj.{kind}"]
        elif f"self_attn.q_proj.{kind}" in mine:
            rows, d, per = [], spec.head_dim, spec.num_heads // spec.num_kv_heads
            q, k, v = (mine[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
            for g in range(spec.num_kv_heads):
                rows += [q[g * per * d : (g + 1) * per * d], k[g * d : (g + 1) * d], v[g * d : (g + 1) * d]]
            found[f"self_attention.linear_qkv.{kind}"] = torch.cat(rows)
        for ours, theirs in (("", ""), ("experts.", "experts.experts."), ("shared_expert.", "shared_experts.")):
            both = [f"mlp.{ours}{x}_proj.{kind}" for x in ("gate", "up")]
            if both[1] in mine:
                parts = [mine[name] for name in both if name in mine]
                found[f"mlp.{theirs}linear_fc1.{kind}"] = torch.cat(parts, int(ours == "experts."))
    return found


def cut(
    name: str, whole: torch.Tensor, tp: int, rank: int, gated: bool, copied_down: bool = True
) -> torch.Tensor:
    """What one tensor-parallel rank has; ``copied_down``: projections down to latents are not cut, as with Transformer
    Engine."""
    experts = int(EXPERTS in name and whole.dim() == 3)
    if name.endswith(("_w", "_v")):
        return whole.chunk(tp)[rank]
    if "linear_fc1" in name and "layer_norm" not in name and gated:
        return torch.cat([half.chunk(tp, experts)[rank] for half in whole.chunk(2, experts)], experts)
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(tp, 1 + experts)[rank]
    rows = ("word_embeddings", "output_layer", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight",
            "linear_fc1.bias", "linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight",
            *(() if copied_down else ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")))  # fmt: skip
    return whole.chunk(tp)[rank] if any(part in name for part in rows) else whole


def save_legacy(
    root: Path, model: torch.nn.Module, spec: ModelSpec, tp: int = 1, pp: int = 1, chunks: int = 1,
    old_names: bool = False, ep: int = 1, experts: str = "sequential", local: bool = False, **changes: Any,
) -> Path:  # fmt: skip
    """Format ``torch``; ``chunks`` of each pipeline rank (interleaved); ``experts`` in the form of which module;
    ``local``: without Transformer Engine; returns the directory of the run."""
    whole = core_tensors(model, spec, fused_norms=not old_names and not local)
    step = root / "iter_0000007"
    sizes = {
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp,
    }  # fmt: skip
    with megatron_modules() as kind:
        namespace = argparse.Namespace(**arguments(spec, model_type=kind.encoder_or_decoder, **sizes | changes))
        for p, t, e in itertools.product(range(pp), range(tp), range(ep)):
            models = [_stage(whole, spec, tp, t, pp, p, chunks, c, old_names, local) for c in range(chunks)]
            models = [_experts_of(one, experts, spec, ep, e) for one in models]
            keys = ["model"] if chunks == 1 else [f"model{c}" for c in range(chunks)]
            numbers = [f"{t:02d}", *([f"{p:03d}"] if pp > 1 else []), *([f"{e:03d}"] if ep > 1 else [])]
            folder = step / f"mp_rank_{'_'.join(numbers)}"
            folder.mkdir(parents=True)
            state = {
                "args": namespace, "checkpoint_version": 3.0, "iteration": 7, **dict(zip(keys, models)),
                "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3}]},
                "rng_state": [{"np": np.random.RandomState(0).get_state(), "torch_rng_state": torch.ones(4)}],
            }  # fmt: skip
            torch.save(state, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


def _stage(
    whole: dict[str, torch.Tensor], spec: ModelSpec, tp: int, t: int, pp: int, p: int, chunks: int, c: int, old: bool,
    local: bool,
) -> dict[str, Any]:  # fmt: skip
    each = spec.num_layers // (pp * chunks)
    assert each * pp * chunks == spec.num_layers
    first = (c * pp + p) * each
    last = p == pp - 1 and c == chunks - 1
    found: dict[str, Any] = {}
    for name, value in whole.items():
        where = name.split(".")
        if where[0] == "decoder" and where[1] == "layers":
            number = int(where[2]) - first
            if not 0 <= number < each:
                continue
            where[2] = str(number)
        elif where[0] == "embedding" and (p or c) or where[0] in ("output_layer", "decoder") and not last:
            continue
        found[".".join(where)] = cut(name, value, tp, t, spec.gated, not local).clone()
    if spec.tied and last and pp > 1:
        head = whole["embedding.word_embeddings.weight"]
        found["output_layer.weight"] = cut("output_layer.weight", head, tp, t, False)
    found["decoder.layers.0.self_attention.linear_qkv._extra_state"] = io.BytesIO(b"\x80")
    return found if not old else _old(found)


def _experts_of(model: dict[str, Any], module: str, spec: ModelSpec, ep: int, e: int) -> dict[str, Any]:
    """One expert-parallel rank's, as SequentialMLP, TEGroupedMLP (grouped) or GroupedMLP (transposed) has them."""
    found: dict[str, Any] = {}
    for name, value in model.items():
        if EXPERTS not in name:
            found[name] = value
            continue
        mine, (mlp, rest) = value.chunk(ep)[e].clone(), name.split(EXPERTS)
        if module == "transposed" and rest == "linear_fc1.weight":  # seen as [experts, hidden, 2 x ffn]
            found[f"{mlp}.mlp.experts.weight1"] = mine.transpose(1, 2).reshape(spec.hidden_size, -1)
        elif module == "transposed":
            found[f"{mlp}.mlp.experts.weight2"] = mine.transpose(1, 2).reshape(-1, spec.hidden_size)
        for i, one in enumerate(mine) if module != "transposed" else ():
            new = f"experts.local_experts.{i}.{rest}" if module == "sequential" else f"experts.{rest}{i}"
            found[f"{mlp}.mlp.{new}"] = one.clone()
    return found


def _old(found: dict[str, Any]) -> dict[str, Any]:
    """As before Megatron Core: other names, nested dictionaries, no state of modules."""
    names = {
        "linear_qkv": "query_key_value", "linear_proj": "dense", "linear_fc1": "dense_h_to_4h",
        "linear_fc2": "dense_4h_to_h", "pre_mlp_layernorm": "post_attention_norm", "input_layernorm": "input_norm",
        "final_layernorm": "final_norm",
    }  # fmt: skip
    model: dict[str, Any] = {}
    for name, value in found.items():
        if name.endswith("_extra_state"):
            continue
        for new, old in names.items():
            name = name.replace(new, old)
        first, rest = name.split(".", 1)
        if first == "embedding":
            module, kind = rest.split(".")
            model.setdefault("embedding", {}).setdefault(module, {})[kind] = value
        elif first == "output_layer":
            model["output_layer"] = {rest: value}
        else:
            model.setdefault("encoder", {})[rest] = value
    return {"language_model": model}


def save_torch_dist(
    root: Path, model: torch.nn.Module, spec: ModelSpec, tp: int = 1, pp: int = 1, stacked: bool = True,
    singly: bool = False, **changes: Any,
) -> Path:  # fmt: skip
    """Format ``torch_dist``; ``stacked``: tensors of layers are one, with the layer as first axis; ``singly``: each
    expert's tensors have names of their own, and gate and up projections, too."""
    step = root / "iter_0000007"
    step.mkdir(parents=True)
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    files: dict[str, io.BytesIO] = {}

    def put(name: str, shape: tuple[int, ...], offset: tuple[int, ...], value: torch.Tensor, file: str) -> None:
        out = files.setdefault(file, io.BytesIO())
        start = out.tell()
        one = io.BytesIO()  # every tensor is a file of its own in it
        torch.save(value.clone(), one)
        out.write(one.getvalue())
        properties = TensorProperties(dtype=value.dtype)
        entry = entries.setdefault(name, TensorStorageMetadata(properties, torch.Size(shape), []))
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offset), value.shape))
        index = MetadataIndex(name, torch.Size(offset))
        places[index] = filesystem._StorageInfo(file, start, len(one.getvalue()))

    tensors = core_tensors(model, spec)
    for name, whole in _singly(tensors).items() if singly else tensors.items():
        where = name.split(".")
        layer = int(where[2]) if where[:2] == ["decoder", "layers"] else None
        file = f"__{0 if layer is None else layer * pp // spec.num_layers}_0.distcp"
        for slices in _pieces(name, whole, tp, spec.gated):
            offset, value = tuple(s.start for s in slices), whole[slices]
            if layer is not None and stacked:
                stored = ".".join(where[:2] + where[3:])
                put(stored, (spec.num_layers, *whole.shape), (layer, *offset), value[None], file)
            else:
                put(name, tuple(whole.shape), offset, value, file)
    put("optimizer.state.exp_avg.decoder.final_layernorm.weight", (3,), (0,), torch.zeros(3), "__0_0.distcp")
    entries["decoder.layers.mlp.linear_fc1._extra_state/shard_0_4"] = BytesStorageMetadata()
    places[MetadataIndex("decoder.layers.mlp.linear_fc1._extra_state/shard_0_4")] = filesystem._StorageInfo("x", 0, 1)
    for file, content in files.items():
        (step / file).write_bytes(content.getvalue())
    (step / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=places)))
    (step / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    with megatron_modules() as kind:
        namespace = argparse.Namespace(**arguments(spec, model_type=kind.encoder_or_decoder, **changes))
        torch.save({"args": namespace, "iteration": 7, "checkpoint_version": 3.0}, step / "common.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7\n")
    return root


def _singly(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, whole in tensors.items():
        mlp, _, rest = name.partition(EXPERTS)
        named = {f"{mlp}{EXPERTS}{i}.{rest}": one for i, one in enumerate(whole)} if rest else {name: whole}
        for one, value in named.items():
            if one.endswith("linear_fc1.weight"):
                found |= dict(zip((f"{one}_w", f"{one}_v"), value.chunk(2), strict=True))
            else:
                found[one] = value
    return found


def _pieces(name: str, whole: torch.Tensor, tp: int, gated: bool) -> Iterator[tuple[slice, ...]]:
    """Where in the whole tensor the parts of tensor-parallel ranks are."""
    numbers = torch.arange(whole.numel()).view(whole.shape)
    for rank in range(tp):
        mine = cut(name, numbers, tp, rank, gated)
        both = "linear_fc1" in name and gated and "layer_norm" not in name and not name.endswith(("_w", "_v"))
        halves = mine.chunk(2, int(EXPERTS in name)) if both else [mine]
        for part in halves:
            first = np.unravel_index(int(part.flatten()[0]), whole.shape)
            yield tuple(slice(int(a), int(a) + n) for a, n in zip(first, part.shape, strict=True))
        if mine.shape == whole.shape:
            return  # one copy is stored
