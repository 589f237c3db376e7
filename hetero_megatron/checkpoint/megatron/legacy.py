"""Megatron's format ``torch``: one file of torch.save per tensor and pipeline rank.

``mp_rank_TT/model_optim_rng.pt``, ``mp_rank_TT_PPP/…`` or, with expert parallelism, ``mp_rank_TT_PPP_EEE`` or
``mp_rank_TT_EEE`` is a dictionary: ``args``, ``checkpoint_version``, and the weights under ``model``, or ``model0``,
``model1`` … where a rank has several chunks of layers (interleaved: chunk 0 of all pipeline ranks comes first). Layers
are numbered from 0 in each. Models from before Megatron Core have their own names, in nested dictionaries.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.checkpoint.megatron.expert_tensors import joined, stacked
from hetero_megatron.checkpoint.megatron.tensors import (
    STAND_INS,
    MegatronTensors,
    Part,
    arguments,
    damaged,
    is_weight,
    same_values,
)
from hetero_megatron.checkpoint.pickles import load_tensors
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import open_file

FILES = ("model_optim_rng.pt", "model_rng.pt")
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MODELS = re.compile(r"model(\d*)")
_Rank = dict[str, Any]  # a file's content
Place = tuple[int, int, int]
# Names of models from before Megatron Core -> Core's.
_OLD = (
    (r"(module\.)*language_model\.", ""),
    (r"embedding\.(word|position)_embeddings\.", r"embedding.\1_embeddings."),
    (r"(encoder|transformer)\.", "decoder."),
    (r"(decoder\.layers\.\d+)\.(input_norm|input_layernorm)\.", r"\1.input_layernorm."),
    (r"(decoder\.layers\.\d+)\.(post_attention_norm|post_attention_layernorm)\.", r"\1.pre_mlp_layernorm."),
    (r"(decoder\.layers\.\d+)\.(self_attention|attention)\.query_key_value\.", r"\1.self_attention.linear_qkv."),
    (r"(decoder\.layers\.\d+)\.(self_attention|attention)\.dense\.", r"\1.self_attention.linear_proj."),
    (r"(decoder\.layers\.\d+)\.mlp\.dense_h_to_4h\.", r"\1.mlp.linear_fc1."),
    (r"(decoder\.layers\.\d+)\.mlp\.dense_4h_to_h\.", r"\1.mlp.linear_fc2."),
    (r"decoder\.final_norm\.", "decoder.final_layernorm."),
    (r"word_embeddings_for_head\.", "output_layer."),
)


def read_legacy(step: Path) -> MegatronTensors:
    """The weights of the checkpoint in a directory with ``mp_rank_*``; its files are mapped, not read.

    Raises:
        UserError: a damaged or missing file, ranks that do not fit together, experts cut otherwise than the rest, or an
            order of queries, keys and values from before version 2.
    """
    files = _files(step)
    loaded = {numbers: _load(path) for numbers, path in files.items()}
    first = loaded[min(loaded)]
    version = first.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < 2:
        raise damaged(f"has checkpoint_version {version!s:.20}; from 2.0 on they are read", step)
    args = arguments(first.get("args"))
    ranks = _places(loaded, args, step)
    tensor_ranks, _, expert_ranks = (1 + max(numbers) for numbers in zip(*ranks, strict=True))
    experts = args.get("num_experts") or 0
    tensors: dict[str, list[Part]] = {}
    layers = 0
    for chunk, pipeline in _chunks(ranks, step):
        tensors_of_ranks = []
        for e in range(expert_ranks):
            models = [_weights(ranks[t, pipeline, e][chunk], step) for t in range(tensor_ranks)]
            if any(model.keys() != models[0].keys() for model in models):
                raise damaged(f"the ranks of mp_rank_*_{pipeline:03d} hold different tensors", step)
            parts = {name: [_part(model[name]) for model in models] for name in models[0]}
            tensors_of_ranks.append(stacked(parts, experts // expert_ranks, step))
        layers_here = 0
        for name, parts_of in joined(tensors_of_ranks, step).items():
            in_layer = _LAYER.fullmatch(name)
            if in_layer is not None:
                layers_here = max(layers_here, int(in_layer[1]) + 1)
            full = name if in_layer is None else f"decoder.layers.{layers + int(in_layer[1])}.{in_layer[2]}"
            _add(tensors, full, parts_of, step)
        layers += layers_here
    return MegatronTensors(tensors, args, str(step), "torch")


def _files(step: Path) -> dict[tuple[int, ...], Path]:
    """The numbers in a folder's name -> its file."""
    files: dict[tuple[int, ...], Path] = {}
    for folder in sorted(step.iterdir()):
        rank = _RANK.fullmatch(folder.name)
        if rank is None:
            continue
        file = next((folder / name for name in FILES if (folder / name).exists()), None)
        if file is None:
            raise damaged(f"{folder.name} holds none of {', '.join(FILES)}", step)
        files[tuple(int(number) for number in rank.groups() if number is not None)] = file
    if len({len(numbers) for numbers in files}) > 1:
        raise damaged("its folders mp_rank_* have names of several forms", step)
    return files


def _places(ranks: dict[tuple[int, ...], _Rank], said: Mapping[str, Any], step: Path) -> dict[Place, _Rank]:
    """By (tensor rank, pipeline rank, expert rank). A single pipeline stage has no number, nor has a single rank of
    experts: of two numbers the second one is what the run's arguments say is divided."""
    of_experts = (said.get("expert_model_parallel_size") or 1) > 1 and said.get("pipeline_model_parallel_size") == 1
    tp, etp = said.get("tensor_model_parallel_size"), said.get("expert_tensor_parallel_size")
    if said.get("num_experts") and type(tp) is type(etp) is int and tp != etp:
        problem = f"its experts are cut for {etp} tensor-parallel ranks and the rest for {tp}, which is not read"
        raise damaged(f"{problem} in this format (torch_dist is)", step)
    places: dict[Place, _Rank] = {}
    for numbers, content in ranks.items():
        t, second, third = [*numbers, 0, 0][:3]  # what has no number is one rank
        p, e = (0, second) if of_experts and len(numbers) < 3 else (second, third)
        places[t, p, e] = content
    sizes = [1 + max(numbers) for numbers in zip(*places, strict=True)]
    for place in itertools.product(*map(range, sizes)):
        if place not in places:
            form = "mp_rank_{0:02d}_{1:03d}" if sizes[2] == 1 else "mp_rank_{0:02d}_{1:03d}_{2:03d}"
            raise damaged(f"{form.format(*place)} is missing", step)
    return places


def _load(path: Path) -> _Rank:
    try:
        with open_file(path) as file:
            content = load_tensors(file, STAND_INS, str(path))
    except UserError as error:
        raise damaged(f"{path.parent.name}/{path.name}: {error.problem}", path.parent.parent) from error
    if not isinstance(content, dict):
        raise damaged(f"{path.parent.name}/{path.name} holds no dictionary", path.parent.parent)
    return content


def _chunks(ranks: dict[Place, _Rank], step: Path) -> list[tuple[str, int]]:
    """(key of the weights, pipeline rank), in the order of the layers."""
    keys = [sorted(key for key in content if isinstance(key, str) and _MODELS.fullmatch(key))
            for content in ranks.values()]  # fmt: skip
    if not keys[0] or any(rank_keys != keys[0] for rank_keys in keys):
        raise damaged("its files hold no weights under 'model', or not all the same chunks", step)
    pipeline = 1 + max(p for _, p, _ in ranks)
    ordered = sorted(keys[0], key=lambda key: int(key.removeprefix("model") or 0))
    return [(key, p) for key in ordered for p in range(pipeline)]


def _weights(model: Any, step: Path) -> dict[str, torch.Tensor]:
    """Tensors by Megatron Core's names."""
    tensors = {}
    for name, tensor in _flat(model, step):
        for pattern, new in _OLD:
            name = re.sub(rf"^{pattern}", new, name)
        if is_weight(name):
            tensors[name] = tensor
    return tensors


def _flat(model: Any, step: Path, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    if not isinstance(model, dict) or depth > 8:
        raise damaged("its weights are not dictionaries of tensors by name", step)
    for key, value in model.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            yield from _flat(value, step, f"{name}.", depth + 1)
        elif value is not None and is_weight(name):  # objects that are None are those of modules without state
            raise damaged(f"{name[:80]} is no tensor", step)


def _part(tensor: torch.Tensor) -> Part:
    return Part(tuple(tensor.shape), tensor.dtype, partial(torch.Tensor.detach, tensor))


def _add(tensors: dict[str, list[Part]], name: str, parts: list[Part], step: Path) -> None:
    """A tied head is in the last stage as well; copies have to be equal."""
    if name not in tensors:
        tensors[name] = parts
        return
    if not same_values(tensors[name], parts):
        raise damaged(f"holds two different tensors {name}", step)
