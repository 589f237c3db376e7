"""Logical tensor names <-> Hugging Face names: one table per naming, used in both directions.

An entry is the Hugging Face tensor, the part of its last axis that holds our tensor (GPT-2 fuses q, k and v),
and whether it is stored transposed (Conv1D).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetero_megatron.layout import Box
from hetero_megatron.spec import ModelSpec, logical_tensors


@dataclass(frozen=True)
class HFSource:
    """Where a logical tensor is stored: ``[start, stop)`` of the last axis (None: all) of tensor ``name``, possibly
    transposed."""

    name: str
    start: int | None = None
    stop: int | None = None
    transpose: bool = False

    def shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the stored tensor, given the logical one's."""
        stored = logical[::-1] if self.transpose else logical
        if self.start is None or self.stop is None:
            return stored
        return (*stored[:-1], 3 * (self.stop - self.start))  # c_attn: query, key and value side by side

    def slices(self, box: Box) -> tuple[slice, ...]:
        """Where a box of the logical tensor is in the stored one (to be transposed where ``transpose`` says so)."""
        slices = list(box.slices())
        if self.transpose:
            slices.reverse()
        if self.start is not None:
            slices[-1] = slice(slices[-1].start + self.start, slices[-1].stop + self.start)
        return tuple(slices)


# logical suffix -> (GPT-2 suffix, third of the fused QKV or None, transposed)
_GPT2_LAYER = {
    "input_layernorm": ("ln_1", None, False),
    "self_attn.q_proj": ("attn.c_attn", 0, True),
    "self_attn.k_proj": ("attn.c_attn", 1, True),
    "self_attn.v_proj": ("attn.c_attn", 2, True),
    "self_attn.o_proj": ("attn.c_proj", None, True),
    "post_attention_layernorm": ("ln_2", None, False),
    "mlp.up_proj": ("mlp.c_fc", None, True),
    "mlp.down_proj": ("mlp.c_proj", None, True),
}
_GPT2_REST = {
    "model.embed_tokens.weight": "transformer.wte.weight",
    "model.embed_positions.weight": "transformer.wpe.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "model.norm.bias": "transformer.ln_f.bias",
    "lm_head.weight": "lm_head.weight",
}


def hf_source(spec: ModelSpec, name: str) -> HFSource:
    """The Hugging Face tensor that holds logical tensor ``name``."""
    if spec.naming == "llama":
        return HFSource(name)
    if name in _GPT2_REST:
        return HFSource(_GPT2_REST[name])
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    assert found, f"not a logical tensor name: {name}"
    layer, suffix, kind = found.groups()
    theirs, third, transpose = _GPT2_LAYER[suffix]
    h = spec.hidden_size
    start, stop = (None, None) if third is None else (third * h, (third + 1) * h)
    return HFSource(f"transformer.h.{layer}.{theirs}.{kind}", start, stop, transpose and kind == "weight")


def name_table(spec: ModelSpec) -> dict[str, HFSource]:
    """All logical tensors of a model."""
    return {t.name: hf_source(spec, t.name) for t in logical_tensors(spec)}
