"""Logical tensors <- Megatron Core's: which of its tensors holds each, and which rows.

Queries, keys and values are one tensor, by key-value group: the group's queries, its key, its value. Gate and up
projection are one tensor, all of the gate first; of several tensor-parallel ranks each has its part of both. Norms may
be part of the linear layer that follows them. Experts are the first axis of their tensors (``experts.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hetero_megatron.checkpoint.megatron.expert_tensors import STACKED
from hetero_megatron.errors import UserError
from hetero_megatron.spec import ModelSpec

_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias|e_score_correction_bias)")
# Logical module -> Core's modules, of which one is there; "{}" is weight or bias.
_MODULES = {
    "input_layernorm": ("self_attention.linear_qkv.layer_norm_{}", "input_layernorm.{}"),
    "post_attention_layernorm": ("mlp.linear_fc1.layer_norm_{}", "pre_mlp_layernorm.{}"),
    "self_attn.q_proj": ("self_attention.linear_qkv.{}",),
    "self_attn.k_proj": ("self_attention.linear_qkv.{}",),
    "self_attn.v_proj": ("self_attention.linear_qkv.{}",),
    "self_attn.q_norm": ("self_attention.q_layernorm.{}",),
    "self_attn.k_norm": ("self_attention.k_layernorm.{}",),
    "self_attn.o_proj": ("self_attention.linear_proj.{}",),
    "mlp.gate_proj": ("mlp.linear_fc1.{}", "mlp.linear_fc1.{}_w"),
    "mlp.up_proj": ("mlp.linear_fc1.{}", "mlp.linear_fc1.{}_v"),
    "mlp.down_proj": ("mlp.linear_fc2.{}",),
    "mlp.gate": ("mlp.router.{}",),
    "mlp.experts.gate_proj": ("mlp.experts.experts.linear_fc1.{}", "mlp.experts.experts.linear_fc1.{}_w"),
    "mlp.experts.up_proj": ("mlp.experts.experts.linear_fc1.{}", "mlp.experts.experts.linear_fc1.{}_v"),
    "mlp.experts.down_proj": ("mlp.experts.experts.linear_fc2.{}",),
    "mlp.shared_expert.gate_proj": ("mlp.shared_experts.linear_fc1.{}", "mlp.shared_experts.linear_fc1.{}_w"),
    "mlp.shared_expert.up_proj": ("mlp.shared_experts.linear_fc1.{}", "mlp.shared_experts.linear_fc1.{}_v"),
    "mlp.shared_expert.down_proj": ("mlp.shared_experts.linear_fc2.{}",),
    "mlp.shared_expert_gate": ("mlp.shared_experts.gate_{}",),
}
_LATENT = _MODULES | {
    "input_layernorm": ("input_layernorm.{}",),
    "self_attn.q_proj": ("self_attention.linear_q_proj.{}",),
    "self_attn.q_a_proj": ("self_attention.linear_q_down_proj.{}",),
    "self_attn.q_a_layernorm": ("self_attention.linear_q_up_proj.layer_norm_{}", "self_attention.q_layernorm.{}"),
    "self_attn.q_b_proj": ("self_attention.linear_q_up_proj.{}",),
    "self_attn.kv_a_proj_with_mqa": ("self_attention.linear_kv_down_proj.{}",),
    "self_attn.kv_a_layernorm": ("self_attention.linear_kv_up_proj.layer_norm_{}", "self_attention.kv_layernorm.{}"),
    "self_attn.kv_b_proj": ("self_attention.linear_kv_up_proj.{}",),
}
_KINDS = {"e_score_correction_bias": "expert_bias"}
_OUTSIDE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.embed_positions.weight": "embedding.position_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "model.norm.bias": "decoder.final_layernorm.bias",
    "lm_head.weight": "output_layer.weight",
}
_ROWS = re.compile(
    r"embedding\.word_embeddings\..*|output_layer\..*"
    r"|.*\.linear_(qkv|fc1|q_proj|q_up_proj|kv_up_proj)\.(weight|bias)(_[wv])?"
)
_DOWN = re.compile(r".*\.linear_(q|kv)_down_proj\.weight")  # cut by rows, or copied with Transformer Engine
_COLUMNS = re.compile(r".*\.linear_(proj|fc2)\.weight")
_GATED = re.compile(r".*\.linear_fc1\.(weight|bias)")

Cut = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class MegatronSource:
    """Where a logical tensor is: in the first of ``names`` that is there, which has ``shape``; ``cut`` takes the
    tensor's own part."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    cut: Cut


def source(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> MegatronSource:
    """Of one logical tensor. UserError: Megatron's models do not have it, or not in a form that is read."""
    match = _IN_LAYER.fullmatch(name)
    if match is None and name in _OUTSIDE:
        return MegatronSource((_OUTSIDE[name],), shape, lambda tensor: tensor[: shape[0]])
    modules = _MODULES if spec.mla is None else _LATENT
    other_layers = spec.parallel_block is not None or spec.attn_gate or spec.single_blocks
    if match is None or match[2] not in modules or other_layers:
        raise UserError(
            "is not read from Megatron's checkpoints", field="SOURCE", value=name,
            accepted="models with norms before attention and MLP, one after the other, and without sinks",
        )  # fmt: skip
    layer, module, kind = match.groups()
    module_names = (form.format(_KINDS.get(kind, kind)) for form in modules[module])
    names = tuple(f"decoder.layers.{layer}.{name}" for name in module_names)
    projection = module.rpartition(".")[2]
    if projection in ("q_proj", "k_proj", "v_proj") and spec.mla is None:
        rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        return MegatronSource(names, (rows, *shape[1:]), _of_groups(spec, projection))
    if projection in ("gate_proj", "up_proj") and spec.gated:
        axis = int(STACKED in names[0])
        both_shape = (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
        return MegatronSource(names, both_shape, _half(shape[axis], projection == "up_proj", axis))
    return MegatronSource(names, shape, lambda tensor: tensor)


def _of_groups(spec: ModelSpec, projection: str) -> Cut:
    queries, d = spec.queries_per_kv, spec.head_dim

    def cut(whole: torch.Tensor) -> torch.Tensor:
        groups = whole.unflatten(0, (spec.num_kv_heads, queries + 2, d))  # [groups, heads of a group, head_dim, …]
        picked = {"q_proj": groups[:, :queries], "k_proj": groups[:, queries], "v_proj": groups[:, queries + 1]}
        return picked[projection].reshape(-1, *whole.shape[1:])

    return cut


def _half(rows: int, second: bool, axis: int) -> Cut:
    """Of a tensor that holds both, or one alone."""
    return lambda tensor: tensor if tensor.shape[axis] == rows else tensor.narrow(axis, rows * second, rows)


def joined_shape(name: str, shapes: Sequence[tuple[int, ...]], rows: int) -> tuple[int, ...]:
    """Of a tensor whose tensor-parallel parts have these shapes; ``rows``: of the whole, as the model has them."""
    first_shape = shapes[0]
    axis = _axis(name, first_shape, rows)
    if axis is None or len(shapes) == 1 or len(first_shape) <= axis:
        return first_shape
    return (*first_shape[:axis], sum(shape[axis] for shape in shapes), *first_shape[axis + 1 :])


def join(name: str, parts: Sequence[torch.Tensor], gated: bool, rows: int) -> torch.Tensor:
    """The whole tensor; ``gated``: the MLP's first tensor is two, of which each part has a part."""
    axis = _axis(name, parts[0].shape, rows)
    if axis is None or len(parts) == 1:
        return parts[0]
    if gated and _GATED.fullmatch(name):
        return torch.cat([half for i in (0, 1) for half in (part.chunk(2, axis)[i] for part in parts)], axis)
    return torch.cat(list(parts), axis)


def is_copied(name: str, shape: tuple[int, ...], rows: int) -> bool:
    """Whether all tensor-parallel ranks have the same; ``shape``: of one part."""
    return _axis(name, shape, rows) is None


def _axis(name: str, shape: tuple[int, ...], rows: int) -> int | None:
    """Along which tensor-parallel parts lie, of which one has this shape, and the whole so many rows."""
    if _DOWN.fullmatch(name):
        return None if shape[:1] == (rows,) else 0
    axis = 0 if _ROWS.fullmatch(name) else 1 if _COLUMNS.fullmatch(name) else None
    return axis if axis is None else axis + (STACKED in name)
