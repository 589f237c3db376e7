"""A model as one GGUF file, which llama.cpp and what is built on it read: ``convert SOURCE FILE.gguf``.

Weights are written one tensor at a time, matrices in 16 or 32 bits and all else in fp32, as llama.cpp's own converter
does. What a reader of the file would compute otherwise than the model says is refused: such readers know the
architecture by its name, and take much of it (windows, activations, norms) from that.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.checkpoint.gguf_tokenizer import tokenizer_fields
from hetero_megatron.checkpoint.names import hf_source
from hetero_megatron.checkpoint.typed import is_finite
from hetero_megatron.errors import UserError
from hetero_megatron.spec import LogicalTensor, ModelSpec, logical_tensors
from hetero_megatron.spec.hf_names import HFSource
from hetero_megatron.spec.rope import Rope
from hetero_megatron.utils.outputs import ASIDE, unwritable
from hetero_megatron.utils.text import tracked

Read = Callable[[LogicalTensor], torch.Tensor]
# dtype of the matrices -> (its name in GGUF, its number among a file's types)
DTYPES = {torch.float32: ("F32", 0), torch.float16: ("F16", 1), torch.bfloat16: ("BF16", 32)}


@dataclass(frozen=True)
class Architecture:
    """What GGUF calls a family, and what its readers take for granted.

    Args:
        paired: queries and keys turn features 2i and 2i + 1 together, so their rows are written in that order.
        pattern: every so many-th layer sees all tokens and has ``Rope`` of its own; the others have a window and turn
            with ``local_theta``; 0: all layers are alike.
        scalings: kinds of stretched rotary embeddings that can be said.
        by_width: number of layers of the size whose scores are scaled by hidden size / heads, not by head size.
        activation: of the MLP; softcaps: of scores and logits are read.
    """

    name: str
    paired: bool = False
    pattern: int = 0
    local_theta: float = 0.0
    scalings: tuple[str, ...] = ("linear",)
    by_width: int = 0
    activation: str = "swiglu"
    softcaps: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", paired=True, scalings=("linear", "llama3")),
    "mistral": Architecture("llama", paired=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", scalings=(), activation="geglu_tanh"),
    "gemma2": Architecture(
        "gemma2", pattern=2, scalings=(), by_width=46, activation="geglu_tanh", softcaps=True
    ),
    "gemma3_text": Architecture(
        "gemma3", pattern=6, local_theta=10000.0, by_width=62, activation="geglu_tanh"
    ),
}


def architecture_of(spec: ModelSpec) -> Architecture:
    """UserError: files of this format cannot say what the model is."""
    architecture = ARCHITECTURES.get(spec.hf_model_type)
    if architecture is None:
        raise _refused(f"there is no conversion of {spec.hf_model_type}", ", ".join(ARCHITECTURES))
    if spec.lora is not None:
        raise _refused("the model has adapters", "the merged model, as --save-hf writes it")
    _check_layers(spec, architecture)
    width = spec.hidden_size / spec.num_heads if spec.num_layers == architecture.by_width else spec.head_dim
    if spec.attn_scale is not None and abs(spec.attn_scale * width**0.5 - 1) > 1e-6:
        raise _refused(
            f"its scores are scaled by {spec.attn_scale:g}", f"1 / sqrt({width:g}), as {architecture.name} has it"
        )
    if spec.activation != architecture.activation:
        raise _refused(
            f"its activation is {spec.activation}", f"{architecture.activation}, as {architecture.name} has it"
        )
    if not architecture.softcaps and (spec.attn_softcap is not None or spec.logit_softcap is not None):
        raise _refused(f"{architecture.name} has no soft caps of scores or logits", "gemma2, or a model without them")
    for rope in spec.ropes:
        scaling = rope.scaling
        if scaling is not None and (scaling.kind not in architecture.scalings or scaling.attention_factor != 1):
            accepted = ", ".join((*architecture.scalings, "none"))
            raise _refused(f"its rotary embedding is stretched by {scaling.kind}", f"rope_scaling: {accepted}")
    return architecture


def _check_layers(spec: ModelSpec, kind: Architecture) -> None:
    for i, layer in enumerate(spec.layers):
        windowed = bool(kind.pattern) and (i + 1) % kind.pattern != 0
        if (layer.window is not None) != windowed:
            seen_tokens = "all tokens" if layer.window is None else f"{layer.window} tokens"
            expected = f"every {kind.pattern}th one sees all" if kind.pattern else "all see all tokens"
            raise _refused(f"layer {i} sees {seen_tokens}", f"a {kind.name} model of which {expected}")
        if layer.rope is None or (windowed and kind.local_theta and layer.rope != Rope(theta=kind.local_theta)):
            raise _refused(f"layer {i} turns otherwise than {kind.name} models do", "the family's own rotary embedding")


def _refused(problem: str, accepted: str) -> UserError:
    return UserError(f"cannot be written as GGUF: {problem}", field="SOURCE", accepted=accepted)


def write_gguf(
    path: str, spec: ModelSpec, read: Read, dtype: torch.dtype, files: Mapping[str, bytes],
    nonfinite: dict[str, None] | None = None,
) -> list[str]:  # fmt: skip
    """Write the file; returns notices.

    Args:
        path: a new file, which appears when it is complete.
        read: values of a logical tensor, of its shape.
        dtype: of the matrices, one of ``DTYPES``.
        files: those of the tokenizer, by name; without them the file has none.
        nonfinite: names of tensors with NaN or Inf are added; None: they are refused.

    Raises:
        UserError: GGUF cannot say what the model or its tokenizer is, or the file cannot be written.
    """
    if importlib.util.find_spec("gguf") is None:
        accepted = "pip install gguf, or a directory"
        raise UserError("gguf is not installed", field="TARGET", value=path, accepted=accepted)
    kind = architecture_of(spec)
    fields, notices = tokenizer_fields(files, spec.vocab_size)
    import gguf

    partial_path = Path(f"{path}{ASIDE}")
    try:
        writer = gguf.GGUFWriter(partial_path, kind.name)
        _describe(writer, gguf, spec, kind, dtype)
        for method, value in fields:
            getattr(writer, method)(value)
        tensors = list(_named(gguf, spec, kind))
        _write_tensors(writer, gguf, spec, kind, tensors, read, dtype, nonfinite)
        writer.close()
        os.rename(partial_path, path)
    except OSError as error:
        raise unwritable(error, path, "TARGET") from error
    finally:
        partial_path.unlink(missing_ok=True)
    return notices


def _describe(writer: Any, gguf: Any, spec: ModelSpec, kind: Architecture, dtype: torch.dtype) -> None:
    """What the model is."""
    rope = spec.layers[kind.pattern - 1 if 0 < kind.pattern <= spec.num_layers else 0].rope
    assert rope is not None
    writer.add_name(spec.name)
    writer.add_file_type(DTYPES[dtype][1])
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.ffn_hidden_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(rope.turned(spec.head_dim))
    writer.add_rope_freq_base(rope.theta)
    if rope.scaling is not None and rope.scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.scaling.factor)
    windows = [layer.window for layer in spec.layers if layer.window is not None]
    if windows:
        writer.add_sliding_window(windows[0])
    if spec.attn_softcap is not None:
        writer.add_attn_logit_softcapping(spec.attn_softcap)
    if spec.logit_softcap is not None:
        writer.add_final_logit_softcapping(spec.logit_softcap)


def _named(gguf: Any, spec: ModelSpec, kind: Architecture) -> Iterable[tuple[str, LogicalTensor]]:
    """GGUF's name of each tensor."""
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind.name)
    names = gguf.get_tensor_name_map(arch, spec.num_layers)
    for tensor in logical_tensors(spec):
        source = hf_source(spec, tensor.name)
        assert source == HFSource(source.name), f"{tensor.name} is not a tensor of its own in {kind.name}"
        name = names.get_name(source.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise _refused(f"{kind.name} has no place for {source.name}", "a model of the plain family")
        yield name, tensor


def _write_tensors(
    writer: Any, gguf: Any, spec: ModelSpec, kind: Architecture, tensors: list[tuple[str, LogicalTensor]], read: Read,
    dtype: torch.dtype, nonfinite: dict[str, None] | None,
) -> None:  # fmt: skip
    """Headers of all, then the values one after the other."""
    extra = _frequency_factors(spec)
    for name, shape, file_dtype in (
        *((n, t.shape, _kept(t, dtype)) for n, t in tensors),
        *((n, tuple(values.shape), torch.float32) for n, values in extra.items()),
    ):
        size, raw = torch.Size(shape).numel() * file_dtype.itemsize, gguf.GGMLQuantizationType[DTYPES[file_dtype][0]]
        writer.add_tensor_info(name, shape, _array(torch.empty(0, dtype=file_dtype)).dtype, size, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total = sum(tensor.size for _, tensor in tensors)
    for _, tensor in tracked(tensors, "exporting weights", total, lambda entry: entry[1].size, bytes=False):
        values = _converted(spec, kind, tensor, read(tensor)).to(_kept(tensor, dtype))
        if not is_finite(values):
            if nonfinite is None:
                raise UserError(f"is not written: NaN or Inf in {tensor.name}", field="TARGET")
            nonfinite[hf_source(spec, tensor.name).name] = None
        writer.write_tensor_data(_array(values))
    for values in extra.values():
        writer.write_tensor_data(_array(values))


def _kept(tensor: LogicalTensor, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if len(tensor.shape) == 1 else dtype


def _array(values: torch.Tensor) -> Any:
    """NumPy has no bf16: its bits."""
    return values.contiguous().view(torch.int16 if values.dtype == torch.bfloat16 else values.dtype).numpy()


def _converted(spec: ModelSpec, kind: Architecture, tensor: LogicalTensor, values: torch.Tensor) -> torch.Tensor:
    """As the architecture's readers want it: gains of norms whole, rows of queries and keys in pairs."""
    if tensor.name.endswith("norm.weight") and spec.norm_offset:
        return values.to(torch.float32) + spec.norm_offset
    for name, heads in (("q_proj", spec.num_heads), ("k_proj", spec.num_kv_heads)):
        if kind.paired and f".{name}." in tensor.name:
            halves = values.view(heads, 2, spec.head_dim // 2, *values.shape[1:])
            return halves.transpose(1, 2).reshape(values.shape)
    return values


def _frequency_factors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """What llama3's scaling divides each frequency by, [head_dim / 2] in fp32; nothing of other scalings."""
    rope = spec.layer(0).rope
    if rope is None or rope.scaling is None or rope.scaling.kind != "llama3":
        return {}
    from hetero_megatron.ops.rope import rope_frequencies

    unscaled = rope_frequencies(Rope(rope.theta, None, rope.dims, rope.interleaved), spec.head_dim, False)
    return {"rope_freqs.weight": (unscaled / rope_frequencies(rope, spec.head_dim, False)).to(torch.float32)}
