"""Named models, and reading a model from a directory or a config.json."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hetero_megatron.errors import UserError
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec
from hetero_megatron.spec.rope import Rope, RopeScaling
from hetero_megatron.utils.files import member, read_json_object
from hetero_megatron.utils.text import did_you_mean


def gpt(
    name: str, layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048, notice: str = ""
) -> ModelSpec:
    """A GPT-2-like decoder: layer norm, GELU, biases, learned positions, tied embedding."""
    return ModelSpec(
        name, "gpt2", layers, hidden, 4 * hidden, heads, heads, hidden // heads, vocab, positions, norm="layer",
        activation="gelu_tanh", qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, position="learned",
        notices=(notice,) if notice else (),
    )  # fmt: skip


def _deep_llama(name: str, layers: int) -> ModelSpec:
    """Llama2-70B with another depth."""
    notice = f"{name} is assumed to be Llama2-70B with {layers} layers: the paper does not publish its shape"
    return ModelSpec(name, "llama", layers, 8192, 28672, 64, 8, 128, 32000, 4096, notices=(notice,))


PAPER_MODELS = (
    gpt("megatron-1.7b", 24, 2304, 24),
    gpt("megatron-3.6b", 30, 3072, 32),
    gpt("megatron-7.5b", 36, 4096, 32),
    gpt("megatron-18b", 40, 6144, 48),
    gpt("megatron-22b", 48, 6144, 64),
    gpt("megatron-39b", 48, 8192, 64),
    gpt("megatron-76b", 60, 10240, 80),
    gpt("megatron-145b", 80, 12288, 96),
    gpt("gpt3-175b", 96, 12288, 96),
    gpt("megatron-310b", 96, 16384, 128),
    gpt("megatron-530b", 105, 20480, 128),
    gpt("megatron-1t", 128, 25600, 160),
    gpt("opt-350m", 24, 1024, 16, 50272, notice="opt-350m is taken as a pre-norm GELU decoder with tied embedding"),
    gpt("gpt-neo-2.7b", 32, 2560, 20, 50257, notice="gpt-neo-2.7b is taken with full attention in all layers"),
    _deep_llama("hethub-35b", 40),
    _deep_llama("hethub-140b", 160),
    _deep_llama("h2-100b", 116),
)


def _llama(
    name: str,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int = 32000,
    positions: int = 4096,
) -> ModelSpec:
    return ModelSpec(name, "llama", layers, hidden, ffn, heads, kv_heads, hidden // heads, vocab, positions)


def _rope(theta: float, scaling: RopeScaling | None = None) -> tuple[LayerKind, ...]:
    return (LayerKind(rope=Rope(theta, scaling)),)


_LLAMA31 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)

_PRESETS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        # Byte-level vocabulary (256 bytes + end of document): trains on a laptop in a minute.
        _llama("tiny", 6, 128, 352, 8, 4, vocab=257, positions=2048),
        _llama("llama2-7b", 32, 4096, 11008, 32, 32),
        _llama("llama2-13b", 40, 5120, 13824, 40, 40),
        _llama("llama-30b", 60, 6656, 17920, 52, 52, positions=2048),
        _llama("llama2-70b", 80, 8192, 28672, 64, 8),
        replace(_llama("llama3-8b", 32, 4096, 14336, 32, 8, 128256, 8192), layer_kinds=_rope(5e5)),
        replace(_llama("llama3-70b", 80, 8192, 28672, 64, 8, 128256, 8192), layer_kinds=_rope(5e5)),
        replace(
            _llama("llama3.1-8b", 32, 4096, 14336, 32, 8, 128256, 131072),
            layer_kinds=_rope(5e5, _LLAMA31),
        ),
        replace(
            _llama("mistral-7b", 32, 4096, 14336, 32, 8, 32000, 32768),
            layer_kinds=(LayerKind(window=4096),), hf_model_type="mistral",
        ),
        replace(
            _llama("qwen2.5-7b", 28, 3584, 18944, 28, 4, 152064, 131072),
            norm_eps=1e-6, qkv_bias=True, layer_kinds=_rope(1e6), hf_model_type="qwen2",
        ),
        ModelSpec(
            "qwen3-8b", "qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960,
            norm_eps=1e-6, qk_norm="head", layer_kinds=_rope(1e6),
        ),
        ModelSpec(
            "gpt2", "gpt2", 12, 768, 3072, 12, 12, 64, 50257, 1024, norm="layer", activation="gelu_tanh",
            qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, position="learned",
        ),
        *PAPER_MODELS,
    )
}  # fmt: skip


def preset_names() -> tuple[str, ...]:
    return tuple(_PRESETS)


def model_folder(name: str | None) -> str | None:
    """The directory that --model names; None for a preset or a file."""
    return name if name is not None and name not in _PRESETS and os.path.isdir(name) else None


def load_model(name: str, field: str = "--model") -> ModelSpec:
    """A preset, a Hugging Face model directory, or a config.json; for another ``field`` than --model, no preset: what
    brings weights is a directory, also where it is called ``gpt2``.

    Raises:
        UserError: no such preset or file, or a configuration that is not supported.
    """
    if name in _PRESETS and field == "--model":
        return _PRESETS[name]
    from hetero_megatron.spec.hf_config import from_hf_config
    from hetero_megatron.spec.mistaken import WRITTEN, refuse_mistaken

    refuse_mistaken(name, field)
    path, folder = Path(name), os.path.isdir(name)  # unlike Path.is_dir, takes any name
    if folder:
        path = member(name, "config.json", where=name, field=field)
    if not os.path.lexists(path) and (folder or field != "--model"):
        problem = "holds no config.json" if folder else "is no file or directory"
        raise UserError(problem, field=field, value=name, accepted=WRITTEN)
    if not os.path.lexists(path):
        raise UserError(
            f"is neither a preset nor a directory with a config.json nor a file{did_you_mean(name, _PRESETS)}",
            field=field, value=name, accepted=f"{', '.join(_PRESETS)}, or a path",
        )  # fmt: skip
    config = read_json_object(path, field)
    # A name that is not UTF-8 could neither be printed nor written into a checkpoint.
    model_name = _model_name(path.parent.resolve()).encode("utf-8", "backslashreplace").decode()
    return from_hf_config(config, where=str(path), name=model_name)


def _model_name(directory: Path) -> str:
    """The directory's name; of a snapshot in the hub's cache (``models--OWNER--NAME/snapshots/REVISION``) NAME."""
    hub = directory.parent.name == "snapshots"
    return directory.parent.parent.name.rpartition("--")[2] if hub else directory.name
