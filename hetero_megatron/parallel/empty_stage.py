"""What a rank holds of a stage before it has values: modules, adapters, weights in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from hetero_megatron.layout import Box
from hetero_megatron.model import GPTStage
from hetero_megatron.ops import KernelPlan
from hetero_megatron.parallel.int8_base import store_in_int8
from hetero_megatron.plan import Stage
from hetero_megatron.spec import Dropout, LogicalTensor, ModelSpec, Share, stage_tensors, tensor_box
from hetero_megatron.spec.dropout import NO_DROPOUT


@dataclass(frozen=True)
class EmptyStage:
    """Attributes, all by logical name but ``module``:
    module: the stage with this rank's share of every tensor, uninitialised.
    tensors: of the stage; boxes: what this rank has of each.
    scales: of frozen weights in 8 bits, uninitialised."""

    module: GPTStage
    tensors: dict[str, LogicalTensor]
    boxes: dict[str, Box]
    scales: dict[str, torch.Tensor]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By logical name."""
        found = dict(self.module.named_parameters())
        assert found.keys() == self.tensors.keys(), f"model and spec disagree: {found.keys() ^ self.tensors.keys()}"
        return found


def empty_stage(
    spec: ModelSpec, stage: Stage, share: Share, dtype: torch.dtype, device: torch.device, kernels: KernelPlan,
    seq_length: int, dropout: Dropout = NO_DROPOUT,
) -> EmptyStage:  # fmt: skip
    """``share``: of the rank in its TP group; ``dtype``: of parameters and activations; ``dropout``: in training."""
    layers = stage.layer_indices()
    tensors = {t.name: t for t in stage_tensors(spec, layers, stage.embed, stage.head)}
    boxes = {name: tensor_box(tensor, share) for name, tensor in tensors.items()}
    scales: dict[str, torch.Tensor] = {}
    module = GPTStage(
        spec, share, layers, stage.embed, stage.head, dtype=dtype, device=device, kernels=kernels,
        seq_length=seq_length, dropout=dropout, store=partial(store_in_int8, tensors, scales),
    )  # fmt: skip
    if spec.lora is not None:
        from hetero_megatron.parallel.lora import apply_lora

        apply_lora(module, spec.lora, boxes, dtype, device)
    return EmptyStage(module, tensors, boxes, scales)
