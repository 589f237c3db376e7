"""What a model is, without torch: configuration, logical tensors, how they are shared, what they cost."""

from hetero_megatron.spec.adapted_model import adapted
from hetero_megatron.spec.dropout import Dropout
from hetero_megatron.spec.lora import Lora
from hetero_megatron.spec.mla import MLA
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec
from hetero_megatron.spec.moe import MoE
from hetero_megatron.spec.presets import load_model, model_folder, preset_names
from hetero_megatron.spec.rope import Rope, RopeScaling
from hetero_megatron.spec.tensors import (
    Axis,
    LogicalTensor,
    Share,
    logical_tensors,
    shares,
    stage_tensors,
    tensor_box,
    trained_tensors,
    whole_share,
)

__all__ = [
    "Axis",
    "adapted",
    "Dropout",
    "MLA",
    "LayerKind",
    "LogicalTensor",
    "Lora",
    "MoE",
    "ModelSpec",
    "Rope",
    "RopeScaling",
    "Share",
    "load_model",
    "logical_tensors",
    "model_folder",
    "preset_names",
    "shares",
    "stage_tensors",
    "tensor_box",
    "trained_tensors",
    "whole_share",
]
